"""Which columns of a table are the inputs and the target, and as what numbers they are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy

from lockstep.errors import UsageError

Kinds = Mapping[str, numpy.dtype[numpy.generic]]
"""Names of columns with the type of their numbers."""


@dataclass(frozen=True)
class Kept:
    """One ``.npy`` file: these columns side by side, ``(rows, columns)``; flat: ``(rows,)``."""

    columns: tuple[str, ...]
    dtype: numpy.dtype[numpy.generic]
    flat: bool = False

    @property
    def row_bytes(self) -> int:
        return len(self.columns) * self.dtype.itemsize

    def shape(self, rows: int) -> tuple[int, ...]:
        return (rows,) if self.flat else (rows, len(self.columns))


@dataclass(frozen=True)
class Selection:
    """What ``data.datasets`` of a table names; see `parquet.parquet`."""

    features: tuple[str, ...]
    target: tuple[str, ...]
    one_target: bool
    ids: bool

    def kept(self, kinds: Kinds) -> dict[str, Kept]:
        """The files to write, by name. Raises `UsageError` for floats where ``ids`` are asked for,
        and for whole numbers that int64 does not hold."""
        features = _whole if self.ids else _floats
        classes = self.one_target and kinds[self.target[0]].kind in "iub"
        target = _whole if classes else _floats
        return {
            "features": Kept(self.features, features(self.features, kinds)),
            "target": Kept(self.target, target(self.target, kinds), flat=classes),
        }


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


def _floats(columns: Sequence[str], kinds: Kinds) -> numpy.dtype[numpy.generic]:
    """float32 where that holds every value, else float64."""
    return numpy.result_type(numpy.float32, *(kinds[name] for name in columns))


def _whole(columns: Sequence[str], kinds: Kinds) -> numpy.dtype[numpy.generic]:
    for name in columns:
        if kinds[name].kind not in "iub" or not numpy.can_cast(kinds[name], numpy.int64):
            raise UsageError(
                f"Column {name} must hold whole numbers that int64 holds, as ids and classes do; "
                f"got {kinds[name]}. Convert it first, or use data.datasets.ids=false."
            )
    return numpy.dtype(numpy.int64)
