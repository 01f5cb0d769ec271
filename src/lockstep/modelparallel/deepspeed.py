"""``deepspeed``: Lightning's strategy, with exact batches. Composed and built by tests, never run:
it needs GPUs. docs/model-parallel.md says what it lacks."""

from __future__ import annotations

import inspect
from datetime import timedelta

from lightning.pytorch.strategies import DeepSpeedStrategy

from lockstep.config import Config
from lockstep.errors import UsageError
from lockstep.strategies.exact_ddp import ExactDDPStrategy

FIXED = {"self", "accelerator", "parallel_devices", "cluster_environment", "precision_plugin"}
"""What is decided elsewhere; ``timeout`` as well, by ``strategy.timeout_s``."""


class ExactDeepSpeedStrategy(ExactDDPStrategy, DeepSpeedStrategy):
    """Weighs each rank's loss, as DeepSpeed averages gradients over ranks like DDP."""

    keeps_parts = True


def deepspeed(config: Config) -> DeepSpeedStrategy:
    """Raises `UsageError` for an option that Lightning's strategy does not have."""
    options = config.strategy.options
    known = inspect.signature(DeepSpeedStrategy.__init__).parameters.keys() - FIXED - {"timeout"}
    for key in options:
        if key not in known:
            raise UsageError(
                f"strategy.options.{key} is no option of trainer.strategy=deepspeed. "
                f"There are: {', '.join(sorted(known))}."
            )
    return ExactDeepSpeedStrategy(timeout=timedelta(seconds=config.strategy.timeout_s), **options)
