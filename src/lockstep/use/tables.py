"""Predictions as a table: a row per sample, a column per number of a prediction."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from lockstep.errors import UsageError
from lockstep.results import replacing

WIDEST = 10_000
"""Columns; more is no table, and its header alone takes longer than its rows."""


def write_table(predictions: Path, output: Path) -> None:
    """Turn ``predictions.pt`` into ``output``, which appears when it is whole; where that
    fails, ``predictions.pt`` is kept.

    A prediction of shape ``(samples,)`` or ``(samples, 1)`` is the column ``prediction``, one of
    ``(samples, 3, 2)`` the columns ``prediction_0_0`` to ``prediction_2_1``; parts of a nesting
    carry their keys. The first column is ``index``, the place in the data set. Numbers are those
    of the prediction's own precision, to the last bit. Raises `UsageError` above `WIDEST` columns.
    """
    writers = {".csv": _write_csv, ".parquet": _write_parquet, ".pt": _write_tensors}
    with replacing(output) as temporary:
        writers[output.suffix](predictions, temporary)
    if not output.samefile(predictions):
        predictions.unlink()


def columns(predictions: object) -> dict[str, np.ndarray]:
    """Name -> values, shape ``(samples,)``, of any nesting of tensors ``(samples, ...)``."""
    leaves, _ = tree_flatten_with_path(predictions)
    numbers = sum(leaf[0].numel() for _, leaf in leaves)
    if numbers > WIDEST:
        raise UsageError(
            f"A table must have at most {WIDEST:,} columns; each prediction has {numbers:,} "
            "numbers. Use output=<name>.pt, which keeps their shape."
        )
    found: dict[str, np.ndarray] = {"index": np.arange(len(leaves[0][1]))}
    for path, leaf in leaves:
        keys = (str(getattr(entry, "key", getattr(entry, "idx", entry))) for entry in path)
        found |= dict(_spread("_".join(("prediction", *keys)), leaf))
    return found


def _spread(name: str, leaf: Tensor) -> Iterator[tuple[str, np.ndarray]]:
    if leaf.dtype == torch.bfloat16:
        leaf = leaf.float()  # numpy has no such type; every value of it is one of float32
    values = leaf.reshape(len(leaf), -1).numpy()
    if values.shape[1] == 1:
        yield name, values[:, 0]
        return
    for column, place in enumerate(product(*map(range, leaf.shape[1:]))):
        yield "_".join((name, *map(str, place))), values[:, column]


def _write_csv(predictions: Path, path: Path) -> None:
    table = columns(torch.load(predictions, weights_only=True))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        # The shortest text that is the same number of its type: float32 has nine digits at most.
        writer.writerows(zip(*(column.astype(str) for column in table.values()), strict=True))


def _write_parquet(predictions: Path, path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = columns(torch.load(predictions, weights_only=True))
    pyarrow.parquet.write_table(pyarrow.table(table), path)


def _write_tensors(predictions: Path, path: Path) -> None:
    path.write_bytes(predictions.read_bytes())
