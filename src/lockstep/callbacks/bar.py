"""A progress bar on one line of the terminal, drawn by time and not by step."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lockstep.console import silence
from lockstep.data.loader import training_position

EVERY_S = 0.1
WIDTH = 30
CLEAR = "\r\x1b[2K"


class Bar(Callback):
    """``epoch 2/10 [=======>      ]  34/64  580 steps/s``, on rank zero.

    It is wiped away before a phase ends, so that log lines stand alone. Lightning's bars redraw at
    each step, which costs more than a small model's step, and share their line with the log.
    """

    def __init__(self) -> None:
        self._started = self._drawn = 0.0
        self._before = 0
        """Batches of this epoch that were done before it was started here."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A run that goes on in an epoch does not start it.
        self._started, self._before = time.perf_counter(), training_position(trainer).batches

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started, self._before = time.perf_counter(), 0

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_due():
            epochs = trainer.max_epochs
            of = f"/{epochs}" if epochs and epochs > 0 else ""
            label = f"epoch {trainer.current_epoch + 1}{of}"
            self._draw(trainer, label, batch_idx + 1, trainer.num_training_batches)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wipe(trainer)

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wipe(trainer)

    @override
    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started, self._before = time.perf_counter(), 0

    @override
    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._is_due():
            total = trainer.num_test_batches[dataloader_idx]
            self._draw(trainer, "test", batch_idx + 1, total)

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wipe(trainer)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._wipe(trainer)

    def _is_due(self) -> bool:
        return time.perf_counter() - self._drawn > EVERY_S

    def _draw(self, trainer: Trainer, label: str, done: int, total: float) -> None:
        self._drawn = now = time.perf_counter()
        if not trainer.is_global_zero:
            return
        speed = (done - self._before) / max(now - self._started, 1e-9)
        if total == float("inf"):  # a stream without a length
            text = f"{label}  {done}  {speed:,.0f} steps/s"
        else:
            filled = round(WIDTH * done / max(total, 1))
            bar = "=" * filled + " " * (WIDTH - filled)
            text = f"{label} [{bar}] {done}/{total}  {speed:,.0f} steps/s"
        self._show(CLEAR + text)

    def _wipe(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            self._show(CLEAR)

    @staticmethod
    def _show(text: str) -> None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            silence(sys.stdout)
