"""The epoch, where loader processes see it too."""

from __future__ import annotations

import os

import torch


class Epoch:
    """Seeds of what is drawn in an epoch.

    Loader processes outlive an epoch and have a copy of this object: the number reaches them in
    shared memory, which each rank makes for itself, as ranks need not be in step.
    """

    def __init__(self) -> None:
        self.seed, self._number, self._owner = 0, torch.zeros(1, dtype=torch.int64), -1

    def start(self, seed: int, epoch: int) -> None:
        self.seed = seed
        if self._owner != os.getpid():
            self._owner, self._number = os.getpid(), torch.zeros(1, dtype=torch.int64)
            self._number.share_memory_()  # type: ignore[no-untyped-call]
        self._number.fill_(epoch)

    def __int__(self) -> int:
        return int(self._number)

    def seed_of(self, *place: int) -> int:
        """From 0 to 2**63 - 1, by (seed, epoch) and the ``place`` within the epoch."""
        return hash((self.seed, int(self), *place)) % 2**63
