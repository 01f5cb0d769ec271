"""The best checkpoint by a metric, and the last."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from typing_extensions import override


class ModelCheckpoint(lightning_callbacks.ModelCheckpoint):
    """Lightning's, with a ``last.ckpt`` that is of the last validation, whether better or not.

    Lightning (2.6) writes it beside a new best alone: a run that was killed would go on from its
    best epoch, and do all since again. The name is kept: checkpoints hold the state under it.
    """

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if not self._should_save_on_train_epoch_end(trainer):
            self._save_last(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if self._should_save_on_train_epoch_end(trainer):
            self._save_last(trainer)

    def _save_last(self, trainer: Trainer) -> None:
        """Nothing where this step has been saved, or none is to be."""
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
