"""A few training steps as a timeline."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile, schedule
from typing_extensions import override

log = logging.getLogger(__name__)


class Trace(Callback):
    """Write ``trace-rank<n>.json``: ``steps`` batches of each rank, after ``skip`` and one more.

    It opens in https://ui.perfetto.dev and chrome://tracing. Not Lightning's PyTorchProfiler: it
    measures a whole epoch's hooks to write the same, and a run shorter than its own schedule less.
    """

    def __init__(self, directory: str, skip: int = 2, steps: int = 3) -> None:
        self.directory, self.skip, self.steps = Path(directory), skip, steps
        self._profile: profile | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path = self.directory / f"trace-rank{trainer.global_rank}.json"
        devices = [ProfilerActivity.CPU]
        if torch.cuda.is_available():  # asked for without one, CUDA complains to stderr
            devices.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=devices,
            schedule=schedule(wait=self.skip, warmup=1, active=self.steps, repeat=1),
            on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(path)),
        )
        self._profile.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._profile is not None:
            self._profile.step()
            if self._profile.step_num == self.skip + 1 + self.steps:
                self._stop()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._profile is not None:
            log.warning(
                "the trace is cut short: training has fewer than %d batches; set "
                "callbacks.trace.skip and callbacks.trace.steps",
                self.skip + 1 + self.steps,
            )
            self._stop()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._profile is not None:
            self._profile.stop()
        self._profile = None
