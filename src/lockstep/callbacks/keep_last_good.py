"""A broken run keeps what it had."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lockstep.checkpoints import save_between_steps

log = logging.getLogger(__name__)


class KeepLastGood(Callback):
    """When a run breaks, save the state before the broken step as ``last_good.ckpt``.

    A training step that raises has not touched the weights. Rank zero saves alone: the other ranks
    may be gone.
    """

    def __init__(self, dirpath: str) -> None:
        self.dirpath = dirpath

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, KeyboardInterrupt | SystemExit):
            return  # a signal comes at any time, also when half of the weights are updated
        if trainer.is_global_zero and trainer.global_step > 0 and trainer.training:
            if not all(torch.isfinite(weight).all() for weight in pl_module.parameters()):
                log.error("last_good.ckpt is not written: the weights hold NaN or infinity")
                return
            path = Path(self.dirpath) / "last_good.ckpt"
            try:
                save_between_steps(trainer, path)
            except (OSError, RuntimeError) as problem:  # the first error is the one to report
                log.error("%s could not be saved: %s", path, problem)
