"""An `IterableDataset` that ranks and loader processes share, each sample going to one of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate
from typing_extensions import override

from lockstep.data.epoch import Epoch
from lockstep.errors import UsageError


class Stream(Dataset[Any]):
    """``source`` as a data set by index, for indices that ascend, as those without a shuffle do.

    Each process reads the whole source and keeps its share: place i of the source is sample i, so
    global batches, weights and resuming are those of any data set. That needs a source with a
    length, which yields the same samples in the same order to every process that iterates it. What
    it draws from the generators of Python, NumPy and torch is the same everywhere, by (seed,
    epoch); its ``start_epoch(seed, epoch)`` or ``set_epoch(epoch)`` is called before each reading.

    Raises `UsageError` when the source yields fewer or more samples than its length, which is what
    a source does that shares itself out.
    """

    def __init__(self, source: IterableDataset[Any], name: str) -> None:
        self.source, self.name = source, name
        self._epoch, self._next = Epoch(), 0
        self._iterator: Iterator[Any] | None = None
        self._draws: tuple[Any, ...] | None = None

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]  # DataModule asks only who has one

    def start_epoch(self, seed: int, epoch: int) -> None:
        self._epoch.start(seed, epoch)
        self._restart()

    @override
    def __getitem__(self, index: int) -> Any:
        return self.read([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return default_collate(self.read(indices))

    def read(self, indices: Sequence[int]) -> list[Any]:
        """The samples at ``indices``, which ascend; a first one that was passed starts anew."""
        if indices[0] < self._next or self._iterator is None:
            self._restart()
        with self._own_draws():
            return [self._sample(index) for index in indices]

    def _sample(self, index: int) -> Any:
        if self._iterator is None:
            for hook, place in (("start_epoch", (self._epoch.seed,)), ("set_epoch", ())):
                if callable(getattr(self.source, hook, None)):
                    getattr(self.source, hook)(*place, int(self._epoch))
            self._iterator = iter(self.source)
        while self._next <= index:
            try:
                sample = next(self._iterator)
            except StopIteration:
                raise self._of_wrong_length(f"it ended after {self._next}") from None
            self._next += 1
        if self._next == len(self) and next(self._iterator, self) is not self:
            raise self._of_wrong_length("it goes on after that")
        return sample

    def _of_wrong_length(self, what: str) -> UsageError:
        return UsageError(
            f"The {self.name} stream must yield as many samples as its __len__ says, in every "
            f"process; {type(self.source).__name__} says {len(self)}, and {what}. A stream must "
            "not share itself out by rank or loader process: that is done here. Leave that out, or "
            "return a LightningDataModule of your own."
        )

    def _restart(self) -> None:
        self._next, self._iterator, self._draws = 0, None, None

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Dropout's draws, which differ by rank, go on afterwards as if nothing was drawn."""
        before = _states()
        if self._draws is None:
            seed = self._epoch.seed_of()
            random.seed(seed)
            numpy.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)  # torch.manual_seed also seeds GPUs
        else:
            _set_states(self._draws)
        try:
            yield
        finally:
            self._draws = _states()
            _set_states(before)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_next": 0, "_iterator": None, "_draws": None}


def _states() -> tuple[Any, ...]:
    return random.getstate(), numpy.random.get_state(), torch.default_generator.get_state()


def _set_states(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.default_generator.set_state(states[2])
