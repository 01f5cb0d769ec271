"""The learning-rate range test, on exactly the batches of a training.

Not Lightning's ``Tuner``: its curve is the loss of rank zero's share of the last micro-batch, so it
is another one under ddp than on one device; it also saves and loads a checkpoint, where this run
ends and leaves nothing.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lockstep.build import Built
from lockstep.callbacks.guards import FiniteLoss
from lockstep.errors import UsageError
from lockstep.find.curve import SKIPPED, draw, rates, smoothed, steepest, write_table
from lockstep.find.lr import FindRate
from lockstep.group import gather
from lockstep.outcome import callbacks_of
from lockstep.record import Run
from lockstep.results import Result
from lockstep.strategies.exact_ddp import batch_weight

log = logging.getLogger(__name__)


class Sweep(Callback):
    """Sets the rate of each optimizer step, and notes the loss that the step starts from.

    The loss is the mean over ranks and accumulated micro-steps. Each rank adds up the same numbers
    in the same order, so all stop together.
    """

    def __init__(self, asked: FindRate) -> None:
        self._rates = rates(asked.min_lr, asked.max_lr, asked.num_training)
        self._threshold = asked.early_stop_threshold
        self._parts: list[float] = []
        self._shares: list[float] = []
        self.losses: list[float] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.lr_scheduler_configs.clear()  # of a module that makes its own
        groups = trainer.optimizers[0].param_groups
        first = groups[0]["lr"]
        self._shares = [group["lr"] / first if first else 1.0 for group in groups]

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        rate = self._rates[len(self.losses)]
        groups = trainer.optimizers[0].param_groups
        for group, share in zip(groups, self._shares, strict=True):
            group["lr"] = rate * share

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning has divided it by the number of micro-steps that a full step has.
        loss = float(outputs["loss"]) * trainer.accumulate_grad_batches
        self._parts.append(loss * batch_weight(trainer))
        if trainer.global_step == len(self.losses):
            return
        of_ranks = gather(sum(self._parts) / len(self._parts))
        self.losses.append(sum(of_ranks) / len(of_ranks))
        self._parts.clear()
        if self._diverges():
            trainer.should_stop = True

    def _diverges(self) -> bool:
        if not math.isfinite(self.losses[-1]):
            return True
        curve = smoothed(self.losses)[SKIPPED:]  # before, it follows each batch
        if not curve:
            return False
        return self._threshold is not None and curve[-1] > self._threshold * min(curve)


def find_rate(asked: FindRate, built: Built, run: Run) -> Result:
    """Raises `UsageError` for a module that steps by itself, and where the loss never falls."""
    trainer, module = built.trainer, built.module
    if not module.automatic_optimization:
        raise UsageError(
            "find=lr needs a module with one optimizer that Lightning steps; "
            f"{type(module).__name__}.automatic_optimization is false. Try rates by a sweep: "
            "-m optimizer.lr=1e-4,1e-3,1e-2."
        )
    sweep = Sweep(asked)
    # The end of the rates may be a loss that is infinite.
    kept = [item for item in callbacks_of(trainer) if not isinstance(item, FiniteLoss)]
    trainer.callbacks = [*kept, sweep]  # type: ignore[attr-defined]
    trainer.fit(module, datamodule=built.data)
    losses = [loss for loss in sweep.losses if math.isfinite(loss)]
    tried = rates(asked.min_lr, asked.max_lr, asked.num_training)[: len(losses)]
    place = steepest(losses)
    if place is None:
        raise UsageError(
            f"find=lr found no rate at which the loss falls, in {len(sweep.losses)} steps from "
            f"{asked.min_lr} on. Use a smaller find.min_lr, or more steps: find.num_training."
        )
    if trainer.is_global_zero:
        write_table(run.directory / "find_lr.csv", tried, losses)
        draw(run.directory / "find_lr.png", tried, losses, place)
        log.info("use: optimizer.lr=%.4g", tried[place] / _scale(run))
    return {
        "metrics": {"find/lr": tried[place] / _scale(run), "find/steps": len(sweep.losses)},
        "output": str(run.directory / "find_lr.csv"),
    }


def _scale(run: Run) -> float:
    """What ``optimizer.scale_lr`` makes of a rate of 1."""
    written, used = run.config.optimizer.get("lr"), run.optimizer.get("lr")
    return used / written if written and used else 1.0
