"""A signal to any process of a run ends all its ranks before the same step, with a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lockstep.checkpoints import save_between_steps
from lockstep.group import in_group
from lockstep.signals import reinstall, stop

log = logging.getLogger(__name__)


class StopTogether(Callback):
    """Before each step the ranks know whether one of them was asked to stop by the step before.

    That exchange of one number runs beside the step, on the CPU, so that nothing waits for it.
    Lightning's own handler calls a collective inside the signal handler, which hangs or fails when
    the other ranks do not join it (https://github.com/Lightning-AI/pytorch-lightning/issues/20806);
    it is installed after ``on_fit_start``, so the first hook that can replace it comes later.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "checkpoints" / "interrupted.ckpt"
        self._group: Any = None
        self._asked: Tensor | None = None
        self._exchange: torch.distributed.Work | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reinstall()
        stop.deferred = True
        if in_group() and trainer.world_size > 1:
            self._group = torch.distributed.new_group(backend="gloo")

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0 and self._someone_was_asked():
            stop.leaving = stop.answered = True  # no further signal may cut the saving short
            self._wait_for_all()
            if trainer.global_step and trainer.checkpoint_callbacks:
                save_between_steps(trainer, self._path)
                if trainer.is_global_zero:
                    log.info("stopped before step %d; saved %s", trainer.global_step, self._path)
            self._wait_for_all()  # the first to leave makes the launching process end the others
            stop.leave()

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reinstall()

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reinstall()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """A rank that is on its way out already must not be cut short."""
        stop.leaving = True

    def _someone_was_asked(self) -> bool:
        if self._group is None:
            return stop.asked is not None
        if self._exchange is not None and self._asked is not None:
            self._exchange.wait()
            if self._asked.item():
                stop.asked = int(self._asked.item())
                return True
        self._asked = torch.tensor(stop.asked or 0)
        self._exchange = torch.distributed.all_reduce(
            self._asked, torch.distributed.ReduceOp.MAX, self._group, async_op=True
        )
        return False

    def _wait_for_all(self) -> None:
        if self._group is not None:
            torch.distributed.barrier(self._group)
