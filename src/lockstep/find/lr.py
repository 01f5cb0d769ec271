"""What ``find=lr`` is asked for. Torch comes in the processes: `lockstep.find.rate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lockstep.config import Config
from lockstep.errors import UsageError
from lockstep.placement import MODEL_PARALLEL
from lockstep.record import Run
from lockstep.results import Result

OF_OTHER_STEPS = ("ddp_async", "local_sgd", *MODEL_PARALLEL)
"""Strategies whose steps are not one device's, or that hold no whole network in a rank."""


@dataclass(frozen=True)
class FindRate:
    """A rate for ``optimizer.lr``; the arguments are those of Lightning's ``Tuner.lr_find``."""

    name: Literal["lr"]
    min_lr: float
    max_lr: float
    num_training: int
    """Optimizer steps, each with the global batch that the config says."""
    early_stop_threshold: float | None
    """Stop at a loss of so many times the smallest one; null: never."""

    title = "finding a learning rate"
    kept = ("lockstep.features.recompute.Recompute",)
    """Callbacks that change how a step is computed. The others watch, save or stop a training."""

    def __call__(self, built: Any, run: Run, /) -> Result:
        from lockstep.find.rate import find_rate

        return find_rate(self, built, run)

    @property
    def steps(self) -> int:
        return self.num_training

    def check(self, config: Config) -> None:
        """Raises `UsageError` for a value, or a strategy, that no rate can be found with."""
        if not 0 < self.min_lr < self.max_lr:
            raise UsageError(
                "find.min_lr must be greater than 0 and less than find.max_lr; got "
                f"{self.min_lr} and {self.max_lr}. Use for example 1e-6 and 1."
            )
        if isinstance(self.num_training, bool) or self.num_training < 20:
            raise UsageError(
                f"find.num_training must be at least 20 steps; got {self.num_training}. Of fewer "
                "losses no slope can be told. Use for example 100."
            )
        if self.early_stop_threshold is not None and not self.early_stop_threshold > 1:
            raise UsageError(
                "find.early_stop_threshold must be greater than 1, or null; got "
                f"{self.early_stop_threshold}. Use for example 4."
            )
        if config.trainer.strategy in OF_OTHER_STEPS:
            raise UsageError(
                "find=lr looks for the rate of one device; got "
                f"trainer.strategy={config.trainer.strategy}. Use trainer.strategy=ddp, or auto on "
                "one device, with the same global batch."
            )
