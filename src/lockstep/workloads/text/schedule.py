"""A learning rate that is warmed up, counted in optimizer steps."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lockstep.errors import UsageError


def warmup_cosine(optimizer: Optimizer, warmup_steps: int, total_steps: int) -> LambdaLR:
    """Linear from near 0 to the optimizer's rate in ``warmup_steps``, then half a cosine to 0.

    Steps are optimizer steps: the global batches of all epochs, whatever the number of processes.
    """
    if not 0 <= warmup_steps < total_steps:
        raise UsageError(
            "scheduler.warmup_steps must be 0 or greater, and less than the training's optimizer "
            f"steps; got {warmup_steps} of {total_steps}. Use {total_steps // 10}."
        )

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        done = (step - warmup_steps) / (total_steps - warmup_steps)
        return (1 + math.cos(math.pi * min(1.0, done))) / 2

    return LambdaLR(optimizer, factor)
