"""Data sets that are read a batch at a time, and the one in memory, many batches at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Dataset
from typing_extensions import override

from lockstep.errors import UsageError

CHUNK_BYTES = 2**24
"""Gathered at once: enough that a small batch costs nothing, little beside any data set."""


class Batched(Dataset[tuple[torch.Tensor, ...]]):
    """A data set that reads a whole batch at once: it is given on as it is, not collated.

    A subclass has ``__len__`` and ``__getitems__``; torch's own base class is not abstract either.
    """

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int | slice) -> tuple[torch.Tensor, ...]:
        """One sample, or the columns of a slice of them, as of a `TensorDataset`."""
        if isinstance(index, slice):
            return self.__getitems__(range(*index.indices(len(self))))
        return tuple(column[0] for column in self.__getitems__([index]))

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Columns ``(len(indices), ...)`` of these samples, in this order."""
        raise NotImplementedError


class Tensors(Batched):
    """Tensors of equal length on dimension 0; a batch is one indexing, not one call a sample."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        lengths = {len(tensor) for tensor in tensors}
        if len(lengths) != 1:
            raise UsageError(f"All tensors must have one length; got {sorted(lengths)}.")
        self.tensors = tensors

    @override
    def __len__(self) -> int:
        return len(self.tensors[0])

    @override
    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """What a batch holds of these samples; a subclass with other samples overrides this."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        return tuple(tensor[rows] for tensor in self.tensors)

    def batches(
        self, rows: torch.Tensor, size: int, pin_memory: bool = False
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """The samples ``rows``, shape ``(n,)``, in batches of ``size``: views of larger copies."""
        sample_bytes = sum(tensor[:1].nbytes for tensor in self.tensors)
        batches = max(1, CHUNK_BYTES // max(1, size * sample_bytes))
        if not len(rows):
            return  # torch splits nothing into one part without rows
        for chunk in torch.split(rows, batches * size):
            copies = [tensor[chunk] for tensor in self.tensors]
            if pin_memory:
                copies = [copy.pin_memory() for copy in copies]
            yield from zip(*(torch.split(copy, size) for copy in copies), strict=True)
