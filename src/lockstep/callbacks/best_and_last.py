"""The best checkpoint by a metric, and the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from typing_extensions import override

from lockstep.errors import UsageError


class ModelCheckpoint(lightning_callbacks.ModelCheckpoint):
    """Lightning's, with a ``last.ckpt`` that is of the last validation, whether better or not.

    Lightning (2.6) writes it beside a new best alone: a run that was killed would go on from its
    best epoch, and do all since again. The name is kept: checkpoints hold the state under it.
    Raises `UsageError` for a last that is a link: it would be one to the best.
    """

    def __init__(self, **options: Any) -> None:
        if options.get("save_last") == "link":
            raise UsageError(
                "callbacks.checkpoint.save_last must be true or false; got link, which would be "
                "one to the best. Use save_last=true."
            )
        super().__init__(**options)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As if the run had always been where it is: of one that was moved, Lightning would forget
        how good the best is, and look for it in the old place."""
        moved = {
            name: self._here(value) if name.endswith("_model_path") else value
            for name, value in state_dict.items()
        }
        best = state_dict["best_k_models"].items()
        moved |= {"dirpath": self.dirpath, "best_k_models": {self._here(k): v for k, v in best}}
        super().load_state_dict(moved)

    def _here(self, path: str) -> str:
        assert self.dirpath is not None, "the trainer has set it"
        here = Path(self.dirpath) / Path(path).name
        return str(here) if path and here.exists() else path

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
