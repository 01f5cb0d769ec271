"""A log line per epoch with its metrics."""

from __future__ import annotations

import logging
import time

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

log = logging.getLogger(__name__)


class EpochLine(Callback):
    """``epoch 3/10  step 192  train/loss 0.0231  val/loss 0.0188  (0.12 s)``, on rank zero.

    The module logs its epoch's mean after the callbacks' ``on_train_epoch_end``; so the line of an
    epoch is written when the next one starts, or when training ends.
    """

    def __init__(self) -> None:
        self._started = 0.0
        self._seconds = 0.0
        self._ended: str | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.perf_counter()  # a run that goes on in an epoch does not start it

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer)
        self._started = time.perf_counter()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epochs = trainer.max_epochs
        of = f"/{epochs}" if epochs and epochs > 0 else ""
        self._ended = f"epoch {trainer.current_epoch + 1}{of}  step {trainer.global_step}"
        self._seconds = time.perf_counter() - self._started

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if self._ended is None or not trainer.is_global_zero:
            return
        values = "  ".join(
            f"{name} {value.item():.4g}"
            for name, value in sorted(trainer.callback_metrics.items())
            if value.numel() == 1
        )
        log.info("%s  %s  (%.2f s)", self._ended, values, self._seconds)
        self._ended = None
