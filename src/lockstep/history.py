"""Reading ``metrics.csv``, which a full disk or a kill may have cut, or a run is writing now."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

Row = dict[str, Any]
History = dict[str, list[tuple[int, float, float]]]
"""Metric -> its values as (step, seconds, value)."""


def read_rows(path: Path) -> tuple[list[Row], int | None]:
    """The rows as they were logged, up to the first line that was cut, and that line's number;
    None where all are whole."""
    rows: list[Row] = []
    with path.open(newline="") as file:
        for number, texts in enumerate(csv.DictReader(file), start=2):
            try:
                row = _typed(texts)
                row["step"], row["seconds"]
            except (KeyError, TypeError, ValueError):
                return rows, number
            rows.append(row)
    return rows, None


def read_history(path: Path) -> History:
    """The metrics of the whole rows; empty where there is no file."""
    history: History = {}
    rows, _ = read_rows(path) if path.exists() else ([], None)
    for row in rows:
        for name in row.keys() - {"step", "epoch", "seconds"}:
            history.setdefault(name, []).append((row["step"], row["seconds"], row[name]))
    return history


def _typed(row: dict[str, str]) -> Row:
    """What a column was not logged for is left out."""
    values: Row = {name: float(text) for name, text in row.items() if text != ""}
    return values | {name: int(values[name]) for name in ("step", "epoch") if name in values}
