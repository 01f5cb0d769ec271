"""Which columns of a table are the inputs and the target, and as what numbers they are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy

from lockstep.errors import UsageError


@dataclass(frozen=True)
class Kind:
    """What a column holds in each row: a number, or a list of ``width`` of them."""

    dtype: numpy.dtype[numpy.generic]
    width: int | None = None

    @property
    def places(self) -> int:
        return 1 if self.width is None else self.width


Kinds = Mapping[str, Kind]
"""By the names of columns."""


@dataclass(frozen=True)
class Kept:
    """One ``.npy`` file: these columns side by side, ``(rows, places)``; flat: ``(rows,)``."""

    columns: tuple[str, ...]
    dtype: numpy.dtype[numpy.generic]
    places: int
    flat: bool = False

    @property
    def row_bytes(self) -> int:
        return self.places * self.dtype.itemsize

    def shape(self, rows: int) -> tuple[int, ...]:
        return (rows,) if self.flat else (rows, self.places)


@dataclass(frozen=True)
class Selection:
    """What ``data.datasets`` of a table names; see `parquet.parquet`. No target: to predict it."""

    features: tuple[str, ...]
    target: tuple[str, ...]
    one_target: bool
    ids: bool

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Those of each file that is written."""
        named = {"features": self.features, "target": self.target}
        return {file: columns for file, columns in named.items() if columns}

    def kept(self, kinds: Kinds) -> dict[str, Kept]:
        """The files to write, by name. Raises `UsageError` for floats where ``ids`` are asked for,
        and for whole numbers that int64 does not hold."""
        files = {"features": _kept(self.features, kinds, whole=self.ids)}
        if self.target:
            target = kinds[self.target[0]]
            classes = self.one_target and target.width is None and target.dtype.kind in "iub"
            files["target"] = _kept(self.target, kinds, whole=classes, flat=classes)
        return files


def select(features: Sequence[str], target: str | Sequence[str] | None, ids: bool) -> Selection:
    """Raises `UsageError` where a name is missing, comes twice, or is in both."""
    if isinstance(features, str) or not features or not target:
        raise UsageError(
            "data.datasets.features must list the columns of the inputs and data.datasets.target "
            f"name that of the answer; got features={features!r}, target={target!r}. "
            "Use data.datasets.features=[a,b] data.datasets.target=c."
        )
    targets = (target,) if isinstance(target, str) else tuple(target)
    names = [*features, *targets]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(
            "data.datasets.features and data.datasets.target must name each column once; got "
            f"{', '.join(twice)} more than once. A target among the inputs would be its own answer."
        )
    return Selection(tuple(features), targets, isinstance(target, str), ids)


def _kept(columns: tuple[str, ...], kinds: Kinds, whole: bool, flat: bool = False) -> Kept:
    dtype = (_whole if whole else _floats)(columns, kinds)
    return Kept(columns, dtype, sum(kinds[name].places for name in columns), flat)


def _floats(columns: Sequence[str], kinds: Kinds) -> numpy.dtype[numpy.generic]:
    """float32 where that holds every value, else float64."""
    return numpy.result_type(numpy.float32, *(kinds[name].dtype for name in columns))


def _whole(columns: Sequence[str], kinds: Kinds) -> numpy.dtype[numpy.generic]:
    for name in columns:
        dtype = kinds[name].dtype
        if dtype.kind not in "iub" or not numpy.can_cast(dtype, numpy.int64):
            raise UsageError(
                f"Column {name} must hold whole numbers that int64 holds, as ids and classes do; "
                f"got {dtype}. Convert it first, or use data.datasets.ids=false."
            )
    return numpy.dtype(numpy.int64)
