"""When the first step of a run ended, on the wall clock."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class FirstStep(Callback):
    """Writes ``first_step``, seconds since 1970, on rank zero."""

    def __init__(self, directory: str) -> None:
        self._path, self._written = Path(directory) / "first_step", False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._written and trainer.is_global_zero:
            self._path.write_text(str(time.time()))
        self._written = True
