"""Learning rates that are counted in optimizer steps, and how a module hands them to Lightning."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lockstep.errors import UsageError

DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
    "none": lambda _: 1.0,
}
"""Share of the steps after the warm-up that are done -> share of the rate that is left."""


def warmup(
    optimizer: Optimizer,
    warmup_steps: int,
    total_steps: int,
    decay: str = "cosine",
    final: float = 0.0,
) -> LambdaLR:
    """Linear from near 0 to the optimizer's rate in ``warmup_steps``, then down to ``final`` of it.

    Steps are optimizer steps: the global batches of all epochs, whatever the number of processes.
    """
    if not 0 <= warmup_steps < total_steps:
        raise UsageError(
            "scheduler.warmup_steps must be 0 or greater, and less than the training's optimizer "
            f"steps; got {warmup_steps} of {total_steps}. Use {total_steps // 10}."
        )
    if decay not in DECAYS:
        raise UsageError(f"scheduler.decay must be one of {', '.join(DECAYS)}; got {decay!r}.")
    if not 0 <= final <= 1:
        raise UsageError(
            f"scheduler.final must be a share of optimizer.lr, from 0 to 1; got {final}. Use 0.1."
        )

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
        return final + (1 - final) * DECAYS[decay](done)

    return LambdaLR(optimizer, factor)


def scheduled(
    optimizer: Optimizer, make: Callable[..., Any] | None, trainer: Trainer
) -> Optimizer | dict[str, Any]:
    """What `LightningModule.configure_optimizers` returns.

    A ``make`` that takes ``total_steps`` (`warmup`; torch's OneCycleLR) gets the training's number
    of optimizer steps, unless it has one, and is stepped once per optimizer step; every other once
    per epoch. Raises `UsageError` where training has no last step.
    """
    if make is None:
        return optimizer
    if "total_steps" not in inspect.signature(make).parameters:
        return {"optimizer": optimizer, "lr_scheduler": make(optimizer)}
    steps: dict[str, Any] = {}
    if getattr(make, "keywords", {}).get("total_steps") is None:
        steps["total_steps"] = _optimizer_steps(trainer)
    scheduler = make(optimizer, **steps)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
    }


def _optimizer_steps(trainer: Trainer) -> int:
    """Lightning asks the loader, and makes it for that. Optimizers are made before the position in
    the epoch is restored: a loader that stayed would start a resumed run at the epoch's begin."""
    loop: Any = trainer.fit_loop
    made = loop._combined_loader
    steps = trainer.estimated_stepping_batches
    loop._combined_loader = made
    if not math.isfinite(steps):
        raise UsageError(
            "A scheduler that counts optimizer steps must know the last one; got "
            f"trainer.max_epochs={trainer.max_epochs} trainer.max_steps={trainer.max_steps}. "
            "Set one of them, or scheduler=none."
        )
    return int(steps)
