"""The one DataModule: three data sets in, loaders out that are exact for any world size."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, IterableDataset
from typing_extensions import override

from lockstep.config import DataConfig
from lockstep.data.agreement import refuse_other_orders
from lockstep.data.loader import ResumableLoader, ShardLoader, training_position
from lockstep.data.sharding import EvalShards, TrainShards, share_of_data
from lockstep.data.stream import Stream
from lockstep.data.tensors import Batched
from lockstep.errors import UsageError
from lockstep.sizes import BatchSizes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Splits:
    """What a ``data.datasets`` function returns. A split that there is not is None."""

    train: Dataset[Any]
    val: Dataset[Any] | None = None
    test: Dataset[Any] | None = None
    predict: Dataset[Any] | None = None
    """What ``predict=true`` predicts; None: the test split."""
    floor: float | None = None
    """The test loss that no model can undercut, where it is known; shown beside the result."""


def train_split(trainer: Any) -> Any:
    """The training data of ``trainer``'s `DataModule`; None without one."""
    data = getattr(trainer, "datamodule", None)
    return data.splits.train if isinstance(data, DataModule) else None


def as_fetched(batch: Any) -> Any:
    """Collate nothing: `__getitems__` has made the batch."""
    return batch


class DataModule(LightningDataModule):
    """Loaders whose global batches are the same for every strategy and device count.

    An iterable data set with a length is sharded as a `Stream`. Raises `UsageError` for an empty
    data set, and for one without a length, which cannot be sharded exactly.
    """

    def __init__(self, splits: Splits, config: DataConfig, sizes: BatchSizes, seed: int) -> None:
        super().__init__()
        self.splits, self.config, self.sizes, self.seed = splits, config, sizes, seed
        for name in ("train", "val", "test", "predict"):
            self._check(name, getattr(splits, name))
            if isinstance(stream := getattr(splits, name), IterableDataset):
                as_indexed: Any = {name: Stream(stream, name)}
                self.splits = replace(self.splits, **as_indexed)
        if splits.val is None:
            # Lightning looks for the loader's method only, before it calls it.
            warnings.filterwarnings("ignore", ".*a `val_dataloader` but have no `validation_step`")
        assert isinstance(splits.train, Sized)
        if sizes.global_ > len(splits.train):
            log.info(
                "data.global_batch_size is %d, the training set holds %d samples: one batch of all",
                sizes.global_,
                len(splits.train),
            )

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        share = share_of_data(self.trainer)
        sampler = TrainShards(
            self.splits.train,
            global_batch_size=self.sizes.global_,
            rank=share.rank,
            world_size=share.world_size,
            seed=self.seed,
            # A stream comes in its own order.
            shuffle=self.config.shuffle and not isinstance(self.splits.train, Stream),
            drop_last=self.config.drop_last,
        )
        per_process = -(-sampler.global_batch_size // share.world_size)
        loader = self._loader(ResumableLoader, self.splits.train, sampler, per_process)
        assert isinstance(loader, ResumableLoader)
        loader.trainer, loader.seed = self.trainer, self.seed
        sampler.set_epoch(training_position(self.trainer).epoch)
        self._check_order(self.splits.train, self.seed, sampler.epoch)
        return loader

    @override
    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        return self._evaluate(self.splits.val)

    @override
    def test_dataloader(self) -> DataLoader[Any] | list[Any]:
        return self._evaluate(self.splits.test)

    @override
    def predict_dataloader(self) -> DataLoader[Any] | list[Any]:
        return self._evaluate(self._to_predict)

    @property
    def predict_samples(self) -> int:
        """How many predictions there will be; 0 without a data set to predict."""
        dataset = self._to_predict
        return len(dataset) if isinstance(dataset, Sized) else 0

    @property
    def predicts_without_target(self) -> bool:
        """Whether samples to predict have fewer columns than those to train on."""
        predict = self.splits.predict
        return predict is not None and _columns(predict) < _columns(self.splits.train)

    @property
    def _to_predict(self) -> Dataset[Any] | None:
        return self.splits.predict if self.splits.predict is not None else self.splits.test

    def _evaluate(self, dataset: Dataset[Any] | None) -> DataLoader[Any] | list[Any]:
        if dataset is None:
            # Lightning takes an empty list for "no such stage", and warns of it all the same.
            warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero")
            return []
        self._check_order(dataset, 0, 0)
        share = share_of_data(self.trainer)
        sampler = EvalShards(dataset, rank=share.rank, world_size=share.world_size)
        return self._loader(ShardLoader, dataset, sampler, self.sizes.eval_per_process)

    def _loader(
        self,
        kind: type[ShardLoader],
        dataset: Dataset[Any],
        sampler: TrainShards | EvalShards,
        batch_size: int,
    ) -> DataLoader[Any]:
        workers = self.config.num_workers
        if isinstance(dataset, Batched):
            # Read many samples at a time, loader processes would only slow most of them down.
            warnings.filterwarnings("ignore", ".*does not have many workers")
        return kind(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=as_fetched if isinstance(dataset, Batched | Stream) else None,
            pin_memory=torch.cuda.is_available(),
            # The process's own generator is for dropout: its draws must not depend on loaders.
            generator=torch.Generator().manual_seed(self.seed),
        )

    def _check_order(self, dataset: Dataset[Any], seed: int, epoch: int) -> None:
        if isinstance(dataset, Stream):
            refuse_other_orders(dataset, seed, epoch, self.config.num_workers)

    @staticmethod
    def _check(name: str, dataset: Dataset[Any] | None) -> None:
        if dataset is None:
            return
        if not isinstance(dataset, Sized):
            raise UsageError(
                f"The {name} data set must have a length, so that ranks can share it exactly; got "
                f"{type(dataset).__name__}, without __len__. Give it one, or return a "
                "LightningDataModule of your own that shards its stream by rank."
            )
        if len(dataset) == 0:
            raise UsageError(
                f"The {name} data set must hold at least one sample; got 0. "
                "Look at data.datasets: its path, its filter, its sizes."
            )


def _columns(dataset: Any) -> int:
    sample = dataset[0]
    return len(sample) if isinstance(sample, tuple | list) else 1
