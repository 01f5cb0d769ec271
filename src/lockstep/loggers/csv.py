"""``metrics.csv``: what was logged, a row per step."""

from __future__ import annotations

import csv
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

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
        self._written = 0

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
        self._write(len(self._rows) - 1)

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._write(len(self._rows))

    def _write(self, end: int) -> None:
        new = self._rows[self._written : end]
        if not new:
            return
        unknown = sorted({name for row in new for name in row} - set(self._columns))
        self._columns += unknown
        rewrite = bool(unknown) or self._written == 0
        with self.path.open("w" if rewrite else "a", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            if rewrite:
                writer.writeheader()
            writer.writerows(self._rows[:end] if rewrite else new)
        self._written = end
