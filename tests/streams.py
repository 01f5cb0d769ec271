"""Streams for tests: `IterableDataset`s whose targets are the places of their samples."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import numpy
import torch
from recording import indexed
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from lockstep.data import Splits
from lockstep.data.tensors import Tensors

Sample = tuple[Tensor, Tensor]


class Unsized(IterableDataset[Sample]):
    def __init__(self, data: Tensors, off_by: int = 0) -> None:
        self.data, self.off_by = data, off_by

    def order(self) -> list[int]:
        return list(range(len(self.data)))

    def __iter__(self) -> Iterator[Sample]:
        order = self.order()
        for index in order + order[: self.off_by] if self.off_by >= 0 else order[: self.off_by]:
            yield self.data[index]


class Sized(Unsized):
    def __len__(self) -> int:
        return len(self.data)


class Shuffled(Sized):
    """Draws its order from all three generators, as a shuffle buffer would from one of them."""

    def order(self) -> list[int]:
        order = super().order()
        random.shuffle(order)
        numpy.random.shuffle(order)
        return [order[index] for index in torch.randperm(len(order)).tolist()]


class SharesItself(Sized):
    """By loader process, as in torch's documentation of `IterableDataset`."""

    def order(self) -> list[int]:
        worker = get_worker_info()
        order = super().order()
        return order if worker is None else order[worker.id :: worker.num_workers]


class Unseeded(Sized):
    """Another order in each reading."""

    def order(self) -> list[int]:
        order = super().order()
        random.Random().shuffle(order)
        return order


class ByProcess(Sized):
    """Another order in each process, as that of a set or of files on another disk may be."""

    def order(self) -> list[int]:
        order = super().order()
        random.Random(os.getpid()).shuffle(order)
        return order


KINDS = {
    kind.__name__: kind for kind in (Unsized, Sized, Shuffled, SharesItself, Unseeded, ByProcess)
}


def streams(kind: str, train: int, val: int, test: int, off_by: int = 0) -> Splits:
    """What `recording.indexed` makes, as streams."""
    splits = indexed(train, val, test)
    parts = []
    for part in (splits.train, splits.val, splits.test):
        assert isinstance(part, Tensors)
        parts.append(KINDS[kind](part, off_by))
    return Splits(*parts)
