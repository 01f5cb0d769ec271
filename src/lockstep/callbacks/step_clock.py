"""How fast training was, told from the time stamps of its steps."""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

KEPT = 10_000
"""Time stamps kept, from the end of training back: 80 kB, whatever the run's length."""


class StepClock(Callback):
    """Stamps the end of every training batch; on a GPU that is when it was submitted."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._ends: deque[float] = deque(maxlen=KEPT)
        self._fit_started = self._fit_ended = time.time()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit_started = time.time()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._ends.append(time.perf_counter())
        if self._first is None:
            self._first = time.time()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit_ended = time.time()

    def _steps(self) -> list[float]:
        """Seconds of each step but the first tenth, which warm up."""
        ends = list(self._ends)[len(self._ends) // 10 :]
        return [after - before for before, after in pairwise(ends)]

    def step_s(self) -> float | None:
        """Seconds of a median step; validation between two steps makes a few long ones, which a
        median does not see."""
        steps = self._steps()
        return median(steps) if steps else None

    def _quartiles(self, samples_per_step: int) -> list[float] | None:
        """A quarter of the steps is slower than the first, a quarter faster than the second."""
        steps = self._steps()
        if len(steps) < 2:
            return None
        # Not the default: of two steps it goes beyond both, to durations of zero and less.
        fast, _, slow = quantiles(steps, method="inclusive")
        return [samples_per_step / slow, samples_per_step / fast]

    def measured(self, run_started: float, samples_per_step: int) -> dict[str, Any]:
        """Seconds, and ``samples_per_step`` over the duration of a median step."""
        typical = self.step_s()
        return {
            "time_to_first_step_s": self._first - run_started if self._first else None,
            "fit_s": self._fit_ended - self._fit_started,
            "samples_per_second": samples_per_step / typical if typical else None,
            "samples_per_second_quartiles": self._quartiles(samples_per_step),
        }
