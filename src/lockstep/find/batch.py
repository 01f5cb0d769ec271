"""What ``find=batch`` is asked for. Torch comes in the processes: `trials.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lockstep.config import Config
from lockstep.errors import UsageError
from lockstep.placement import MODEL_PARALLEL
from lockstep.record import Run
from lockstep.results import Result

NOT_ALONE = ("ddp_async", "local_sgd", *MODEL_PARALLEL)
"""Strategies whose step cannot be tried by one rank alone, or keeps copies that such a step does
not show."""


@dataclass(frozen=True)
class FindBatch:
    """The fewest micro-steps for the samples of an optimizer step that each device bears."""

    name: Literal["batch"]
    steps_per_trial: int
    """Optimizer steps of each size that is tried, as of Lightning's ``Tuner.scale_batch_size``."""
    limit_bytes: float | None
    """A size whose peak is above it does not fit; null: all that the device has."""

    title = "finding a batch size"
    kept = (
        "lockstep.features.recompute.Recompute",
        "lockstep.features.ema.MovingAverage",
    )
    """Callbacks that change what a step takes. The others watch, save or stop a training."""

    def __call__(self, built: Any, run: Run, /) -> Result:
        from lockstep.find.trials import find_batch

        return find_batch(self, built, run)

    @property
    def steps(self) -> int:
        return self.steps_per_trial

    def check(self, config: Config) -> None:
        """Raises `UsageError` for a value, or a strategy, that no size can be found with."""
        if isinstance(self.steps_per_trial, bool) or self.steps_per_trial < 2:
            raise UsageError(
                f"find.steps_per_trial must be at least 2; got {self.steps_per_trial}. The first "
                "step makes the optimizer's state, which the second has beside it. Use 3."
            )
        if self.limit_bytes is not None and not self.limit_bytes > 0:
            raise UsageError(
                f"find.limit_bytes must be greater than 0, or null; got {self.limit_bytes}. "
                "Use for example 8e9."
            )
        if config.trainer.strategy in NOT_ALONE:
            raise UsageError(
                "find=batch tries steps of one rank alone, with a whole network; got "
                f"trainer.strategy={config.trainer.strategy}. Use trainer.strategy=ddp, or try "
                "data.global_batch_size with a short run: trainer.max_steps=3."
            )
