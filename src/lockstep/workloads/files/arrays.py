"""Columns in ``.npy`` files, mapped into memory: only the pages of a batch are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from torch import Tensor
from typing_extensions import override

from lockstep.data import Splits
from lockstep.data.tensors import Batched
from lockstep.errors import UsageError
from lockstep.workloads.files.columns import (
    ALLOW,
    REFUSE,
    SCAN,
    Values,
    as_tensor,
    refuse_dtype,
    refuse_not_finite,
    refuse_unequal,
    refuse_unknown,
)

STRETCH_BYTES = 2**24
"""Read at once when a whole file is looked through."""


class Arrays(Batched):
    """A sample is a row of each file: ``(*inputs, target)`` in the order of ``paths``, which errors
    call by ``names`` where these are given.

    Other processes get the paths, not the rows, and map the files themselves. Raises `UsageError`
    for a file that is missing, torn or holds no numbers, for unequal lengths, and, unless ``nan``
    is "allow", for a row that is not finite: before training for "scan", else in its batch.
    """

    def __init__(
        self, paths: Sequence[str], nan: str = REFUSE, names: Sequence[str] | None = None
    ) -> None:
        self.paths, self.nan = [str(Path(path).absolute()) for path in paths], nan
        self.names = self.paths if names is None else list(names)
        self._columns: list[Any] | None = None
        refuse_unknown(nan)
        columns = self._mapped()
        refuse_unequal({p: len(c) for p, c in zip(self.paths, columns, strict=True)})
        self._length = len(columns[0])
        if nan == SCAN:
            for name, column in zip(self.names, columns, strict=True):
                scan(column, name)

    @override
    def __len__(self) -> int:
        return self._length

    @override
    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        rows = numpy.asarray(indices, dtype=numpy.int64)
        # Pages are read in the order of the file, and given out in that of the batch.
        order = numpy.argsort(rows, kind="stable")
        batch = []
        for name, column in zip(self.names, self._mapped(), strict=True):
            values = numpy.empty((len(rows), *column.shape[1:]), column.dtype)
            values[order] = column[rows[order]]
            if self.nan != ALLOW:
                refuse_not_finite(values, rows, name)
            batch.append(as_tensor(values))
        return tuple(batch)

    def _mapped(self) -> list[Any]:
        if self._columns is None:
            self._columns = [map_file(path) for path in self.paths]
        return self._columns

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_columns": None}  # a pickled map is a copy of the file


def npy(
    train: Sequence[str],
    val: Sequence[str] | None = None,
    test: Sequence[str] | None = None,
    predict: Sequence[str] | None = None,
    nan: str = REFUSE,
) -> Splits:
    """Splits of `Arrays`; of each the paths of its columns, inputs first and the target last. Those
    of ``predict`` need no target."""
    if not train:
        raise UsageError(
            "data.datasets.train must name the .npy files of the columns, inputs first and the "
            "target last; got none. Use data.datasets.train=[x.npy,y.npy]."
        )
    others = [Arrays(paths, nan) if paths else None for paths in (val, test, predict)]
    return Splits(Arrays(train, nan), others[0], others[1], others[2])


def map_file(path: str) -> Any:
    """The array in ``path``, of which nothing is read yet, shape ``(rows, ...)``."""
    try:
        array = numpy.load(path, mmap_mode="r")
    except FileNotFoundError as missing:
        raise UsageError(
            f"{path} must be a .npy file; there is none. Look at data.datasets: relative paths are "
            "seen from where the command was started."
        ) from missing
    except (ValueError, EOFError, OSError) as error:
        raise UsageError(
            f"{path} must be a whole .npy file of numbers; NumPy says: {error}. Write it "
            "again with numpy.save(path, array)."
        ) from error
    if not isinstance(array, numpy.ndarray) or array.ndim == 0:
        raise UsageError(
            f"{path} must hold one array whose first axis are the samples; got "
            f"{type(array).__name__}. Write it with numpy.save(path, array), an array a file."
        )
    refuse_dtype(array.dtype, path)
    return array


def scan(column: Values, name: str) -> None:
    """Look at every row, a stretch at a time."""
    rows = max(1, STRETCH_BYTES // max(1, column[:1].nbytes))
    for start in range(0, len(column), rows):
        stretch = numpy.array(column[start : start + rows])
        refuse_not_finite(stretch, numpy.arange(start, start + len(stretch)), name)
