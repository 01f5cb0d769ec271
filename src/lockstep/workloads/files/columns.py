"""What a column of a file must be to become a tensor, and how it does."""

from __future__ import annotations

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.errors import UsageError

Values = NDArray[numpy.generic]
ALLOW, REFUSE, SCAN = "allow", "refuse", "scan"
NAN = (ALLOW, REFUSE, SCAN)
"""``data.datasets.nan``: give NaN and infinity out; refuse them in the batch that holds them; look
through the whole file before training."""
KEPT = (numpy.dtype("uint8"), numpy.dtype("bool"))


def refuse_unknown(nan: str) -> None:
    if nan not in NAN:
        raise UsageError(f"data.datasets.nan must be one of {', '.join(NAN)}; got {nan!r}.")


def refuse_dtype(dtype: numpy.dtype[numpy.generic], where: str) -> None:
    """Numbers of this machine's byte order become tensors; nothing else does."""
    if dtype.kind in "fiub" and dtype.isnative and dtype != numpy.longdouble:
        return
    raise UsageError(
        f"{where} must hold floats, integers or booleans in this machine's byte order; got dtype "
        f"{dtype}. Convert it first: array.astype('float32'), or 'int64' for classes."
    )


def refuse_unequal(lengths: dict[str, int]) -> None:
    """Names of columns with their rows, which must be one number."""
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name}: {rows}" for name, rows in lengths.items())
        raise UsageError(
            f"All columns of a split must have one length; got {shown}. Are they of one data set?"
        )


def refuse_not_finite(values: Values, rows: NDArray[numpy.int64], where: str) -> None:
    """``rows`` are the places in the file of ``values``' first axis."""
    if values.dtype.kind != "f":
        return
    finite = numpy.isfinite(values.reshape(len(values), -1)).all(axis=1)
    if not finite.all():
        bad = rows[numpy.flatnonzero(~finite)[0]]
        raise UsageError(
            f"{where} must be finite; row {bad} holds NaN or infinity. Mend or leave out that row, "
            "or use data.datasets.nan=allow."
        )


def as_tensor(values: Values) -> Tensor:
    """Floats as torch's default dtype, integers as int64; bytes and booleans stay."""
    if values.dtype.kind == "f":
        return torch.from_numpy(values).to(torch.get_default_dtype())
    if values.dtype in KEPT:
        return torch.from_numpy(values)
    return torch.from_numpy(values.astype(numpy.int64))
