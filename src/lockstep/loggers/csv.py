"""``metrics.csv``: what was logged, a row per step."""

from __future__ import annotations

import csv
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from lockstep.history import read_rows

log = logging.getLogger(__name__)

FIXED = ("step", "epoch", "seconds")


class CsvLogger(Logger):
    """Rows of ``step, epoch, seconds`` (since the logger was made) and the metrics of that step.

    Lightning's logger of this kind deletes what it finds in its directory, which here is the run's.
    Values of one step are one row, so the newest row waits in memory for more until the next step
    or the end. A new metric's column rewrites the file; other rows are appended.
    """

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = Path(directory)
        self._started = time.time()
        self._columns: list[str] = list(FIXED)
        self._rows: list[dict[str, Any]] = []
        self._final = 0  # rows in the file that do not change any more
        self._end = 0  # where they end in the file; 0: nothing is written

    @property
    @override
    def name(self) -> str:
        return "csv"

    @property
    @override
    def version(self) -> str:
        return ""

    @property
    @override
    def save_dir(self) -> str:
        return str(self._directory)

    @property
    def path(self) -> Path:
        return self._directory / "metrics.csv"

    @override
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The config is in ``.hydra/config.yaml`` already."""

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        values = dict(metrics)
        epoch = values.pop("epoch", None)
        if not self._rows or self._rows[-1]["step"] != step:
            seconds = round(time.time() - self._started, 3)
            self._rows.append({"step": step, "epoch": epoch, "seconds": seconds})
        self._rows[-1].update(values)

    @override
    @rank_zero_only
    def save(self) -> None:
        self._write(self._rows[:-1])

    @rank_zero_only
    def flush(self) -> None:
        """Write the newest row too, as far as it is known."""
        self._write(self._rows)

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._write(self._rows)

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Take up the history of an interrupted run that goes on from ``step``: what was logged
        after that is logged again."""
        if not self.path.exists():
            return
        rows, cut = read_rows(self.path)
        if cut is not None:
            log.warning("line %d of %s was cut: the history ends before it", cut, self.path)
        self._rows = [row for row in rows if row["step"] < step] + self._rows
        self._started -= max((row["seconds"] for row in self._rows), default=0.0)
        self._columns = list(FIXED)  # the next write finds new columns, and rewrites the file

    def _write(self, rows: list[dict[str, Any]]) -> None:
        """Rows before the last one do not change any more, so they are written once."""
        final = max(len(rows) - 1, 0)
        if len(rows) <= self._final:
            return
        unknown = sorted({name for row in rows[self._final :] for name in row} - set(self._columns))
        self._columns += unknown
        whole = bool(unknown) or self._end == 0
        with self.path.open("w" if whole else "r+", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            if whole:
                writer.writeheader()
            else:
                file.seek(self._end)
                file.truncate()
            writer.writerows(rows[0 if whole else self._final : final])
            self._end = file.tell()
            writer.writerows(rows[final:])
        self._final = final
