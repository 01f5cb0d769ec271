"""A training loader that is taken up in the middle of an epoch, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader
from typing_extensions import override

from lockstep.data.sharding import EvalShards, TrainShards
from lockstep.data.tensors import Tensors


class Position(NamedTuple):
    """A place in the global order, which is the same for every world size."""

    epoch: int
    batches: int
    """Global batches of the epoch that have been trained on."""
    is_over: bool
    """All of the epoch before has been done, its validation and its logging too."""


def training_position(trainer: Trainer | None) -> Position:
    if trainer is None:
        return Position(0, 0, True)
    epoch: Any = trainer.fit_loop.epoch_progress.current
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    is_over = epoch.processed == epoch.ready
    # Not .completed: it is counted after the hooks in which checkpoints are saved.
    return Position(epoch.processed, 0 if is_over else batch.processed, is_over)


class ShardLoader(DataLoader[Any]):
    """One rank's batches. Those of `Tensors` are cut from memory, past DataLoader's fetching: that
    takes a list of Python integers through three layers, longer than a small model's step."""

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        shards, data = self.sampler, self.dataset
        # A subclass may change what a sample is, and loader processes are somebody's wish.
        in_memory = type(data) is Tensors and not self.num_workers
        if in_memory and isinstance(shards, TrainShards | EvalShards):
            assert isinstance(data, Tensors)
            assert self.batch_size is not None
            return data.batches(shards.indices(), self.batch_size, self.pin_memory)
        return super().__iter__()


class ResumableLoader(ShardLoader):
    """Its state is a `Position`.

    Lightning saves and loads the state of a loader that has these two methods. It creates the
    iterator, whose loader processes read ahead, before it tells the sampler the epoch: so the state
    sets both.
    """

    trainer: Trainer | None
    """Knows where training is; the loader itself knows only how far it has read ahead."""
    seed: int

    def state_dict(self) -> dict[str, int]:
        position = training_position(self.trainer)
        return {"epoch": position.epoch, "batches": position.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert isinstance(self.sampler, TrainShards)
        self.sampler.set_epoch(state["epoch"])
        self.sampler.skipped = state["batches"]

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        sampler = self.sampler
        assert isinstance(sampler, TrainShards)
        # Loader processes get their seeds from here and not from the process's own generator, whose
        # draws (dropout) must not depend on when an iterator was made.
        place = (self.seed, sampler.rank, sampler.epoch, sampler.skipped)
        self.generator = torch.Generator().manual_seed(hash(place) % 2**63)
        # A data set that draws by (seed, epoch, index) is told before loader processes read ahead.
        start_epoch = getattr(self.dataset, "start_epoch", None)
        if start_epoch is not None:
            start_epoch(self.seed, sampler.epoch)
        return super().__iter__()
