"""Who sees which sample, in which order.

The order of an epoch is a permutation by (seed, epoch). Global batch k is the same set of samples
for every world size; rank r of W takes every W-th of it. Nothing is repeated: where a last batch
does not divide, ranks get one sample more or less, and a rank that would get none joins the step
with one sample of weight zero, so that all ranks make the same number of steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import chain
from typing import NamedTuple

import torch
from lightning.pytorch import Trainer
from torch.utils.data import Dataset, DistributedSampler
from typing_extensions import override


def epoch_order(samples: int, seed: int, epoch: int, shuffle: bool) -> torch.Tensor:
    """Sample indices in the order of one epoch, shape ``(samples,)``, the same on every rank."""
    if not shuffle:
        return torch.arange(samples)
    # seed and epoch are mixed so that (seed 1, epoch 0) and (seed 0, epoch 1) differ.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(samples, generator=generator)


def share_of(batch: int, rank: int, world_size: int) -> int:
    """How many of a global batch of ``batch`` samples rank ``rank`` gets: every W-th."""
    return max(0, -(-(batch - rank) // world_size))


class Share(NamedTuple):
    """Share ``rank`` of ``world_size``. Ranks that compute a sample together have the same one."""

    rank: int
    world_size: int
    leads: bool
    """Whether this is the first rank that has it."""


def share_of_data(trainer: Trainer | None) -> Share:
    """The share of each global batch that this process loads: its own, but for model parallelism,
    whose ranks ``r * N`` to ``r * N + N - 1`` have share r."""
    told = getattr(trainer.strategy, "distributed_sampler_kwargs", None) if trainer else None
    if trainer is None or told is None:
        return Share(0, 1, True)
    shares, rank = told["num_replicas"], told["rank"]
    return Share(rank, shares, trainer.global_rank % (trainer.world_size // shares) == 0)


def one_by_one(indices: torch.Tensor) -> Iterator[int]:
    """Plain numbers, a stretch at a time: a list of all takes five times the tensor's memory."""
    return chain.from_iterable(stretch.tolist() for stretch in torch.split(indices, 2**16))


class TrainShards(DistributedSampler[int]):
    """One rank's sample indices for training, such that ranks step together.

    Lightning leaves a `DistributedSampler` as it is and calls ``set_epoch`` before each epoch.
    A global batch is full but for an epoch's last one, which ``drop_last`` leaves out. A data set
    smaller than the global batch is one batch.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        *,
        global_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed)
        assert isinstance(dataset, Sized)
        self.samples = len(dataset)
        self.skipped = 0
        """Global batches at the start of an epoch that a resumed run has trained on before."""
        self.global_batch_size = min(global_batch_size, self.samples)
        full, last = divmod(self.samples, self.global_batch_size)
        self.steps = full if drop_last or last == 0 else full + 1

    @override
    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.skipped = 0
        super().set_epoch(epoch)

    def batch_size(self, step: int) -> int:
        """Samples in global batch ``step`` of an epoch, over all ranks."""
        return min(self.global_batch_size, self.samples - step * self.global_batch_size)

    def weight(self, step: int) -> float:
        """What a rank's mean loss counts in global batch ``step``.

        DDP averages gradients over ranks; a rank's mean over n of the batch's N samples must
        therefore count n * W / N. It is 1 for every full batch.
        """
        batch = self.batch_size(step)
        return share_of(batch, self.rank, self.num_replicas) * self.num_replicas / batch

    def indices(self) -> torch.Tensor:
        """This rank's share of the epoch that was set, in order, without what was skipped."""
        order = epoch_order(self.samples, self.seed, self.epoch, self.shuffle)
        order = order[self.skipped * self.global_batch_size : self.steps * self.global_batch_size]
        mine = order[self.rank :: self.num_replicas]
        return torch.cat([mine, order[-1:]]) if self._needs_filler() else mine

    def __iter__(self) -> Iterator[int]:
        return one_by_one(self.indices())

    def __len__(self) -> int:
        used = min(self.samples, self.steps * self.global_batch_size)
        return share_of(used, self.rank, self.num_replicas) + self._needs_filler()

    def _needs_filler(self) -> bool:
        return share_of(self.batch_size(self.steps - 1), self.rank, self.num_replicas) == 0


class EvalShards(DistributedSampler[int]):
    """Every W-th sample from ``rank`` on, in data set order: each is seen once, none is padded.

    Ranks may make a different number of steps, so a step of an evaluation must not exchange
    anything; metrics are reduced once, at its end. A rank without a share gets one sample all the
    same, ``only_filler``, that must not be counted: Lightning would leave out the evaluation on
    that rank, and the others would wait for it when metrics are reduced.
    """

    def __init__(self, dataset: Dataset[object], *, rank: int, world_size: int) -> None:
        super().__init__(dataset, num_replicas=world_size, rank=rank, shuffle=False)
        assert isinstance(dataset, Sized)
        self.samples = len(dataset)
        self.only_filler = share_of(self.samples, rank, world_size) == 0

    def indices(self) -> torch.Tensor:
        mine = torch.arange(min(self.rank, self.samples), self.samples, self.num_replicas)
        return mine.new_zeros(1) if self.only_filler else mine

    def __iter__(self) -> Iterator[int]:
        return one_by_one(self.indices())

    def __len__(self) -> int:
        return max(1, share_of(self.samples, self.rank, self.num_replicas))
