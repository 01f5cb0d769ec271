"""What the cells of a Parquet column hold: a number each, or lists of as many numbers each."""

from __future__ import annotations

from typing import Any

import numpy

from lockstep.errors import UsageError

Numbers = numpy.ndarray[Any, Any]


def is_list(kind: Any) -> bool:
    """Whether pyarrow's type is that of lists; some writers fix their length, some do not."""
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_number(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def numbers(values: Any, width: int | None, where: str, start: int) -> Numbers:
    """Cells from row ``start`` on: ``(rows,)``, or of lists of ``width`` numbers ``(rows, width)``.

    Raises `UsageError` for a null in a cell or in its list, and for a list of another length.
    """
    refuse_nulls(values, where, start)
    if width is None:
        return _array(values)
    lengths = lengths_of(values)
    if (other := numpy.flatnonzero(lengths != width)).size:
        raise UsageError(
            f"{where} must hold lists of one length; row {start + other[0]} has "
            f"{lengths[other[0]]} numbers, those before {width}. Pad or cut its lists to one "
            "length before, or leave it out."
        )
    inner = values.flatten()
    if inner.null_count:
        first = start + numpy.flatnonzero(_array(inner.is_null()))[0] // width
        raise UsageError(
            f"{where} must have a value at each place of its lists; the list of row {first} has a "
            "null. Fill it or drop that row before, with a value of your own choice."
        )
    return _array(inner).reshape(len(values), width)


def lengths_of(lists: Any) -> Numbers:
    """How many numbers are in each list, ``(rows,)``."""
    fixed = getattr(lists.type, "list_size", None)
    return _array(lists.value_lengths()) if fixed is None else numpy.full(len(lists), fixed)


def refuse_nulls(values: Any, where: str, start: int) -> None:
    if values.null_count:
        first = start + numpy.flatnonzero(_array(values.is_null()))[0]
        raise UsageError(
            f"{where} must have a value in each row; row {first} is null. Fill it or drop that row "
            "before, with a value of your own choice."
        )


def _array(values: Any) -> Numbers:
    array: Numbers = values.to_numpy(zero_copy_only=False)
    return array
