"""A broken run keeps what it had."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from typing_extensions import override

from lockstep.checkpoints import save_between_steps
from lockstep.signals import stop

log = logging.getLogger(__name__)


class KeepLastGood(Callback):
    """When a run breaks, save the state before the broken step as ``last_good.ckpt``.

    A step that raises before the optimizer's has not touched the weights; one that is cut short in
    it is not saved. Rank zero saves alone: the other ranks may be gone.
    """

    def __init__(self, dirpath: str) -> None:
        self.dirpath = dirpath
        self._updated = 0
        """The batch of the run, counted from 1, that the weights were last updated for."""

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        self._updated = _counts(trainer).ready

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        told = isinstance(exception, KeyboardInterrupt | SystemExit)
        if stop.answered or (told and stop.asked is not None and stop.peers_are_well()):
            return  # StopTogether has saved, or somebody does not want to wait for it
        counts = _counts(trainer)
        half_done = counts.processed < self._updated == counts.ready
        if half_done or not (trainer.is_global_zero and trainer.global_step and trainer.training):
            return
        if getattr(trainer.strategy, "keeps_parts", False):
            log.error("last_good.ckpt is not written: each rank holds a part of the weights only")
            return
        if not all(torch.isfinite(weight).all() for weight in pl_module.parameters()):
            log.error("last_good.ckpt is not written: the weights hold NaN or infinity")
            return
        path = Path(self.dirpath) / "last_good.ckpt"
        try:
            save_between_steps(trainer, path)
        except (OSError, RuntimeError) as problem:  # the first error is the one to report
            log.error("%s could not be saved: %s", path, problem)


def _counts(trainer: Trainer) -> Any:
    return trainer.fit_loop.epoch_loop.batch_progress.total
