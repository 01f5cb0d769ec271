"""Work around a step that nobody asked for, left out where Lightning lets us.

It matters when a step is small: docs/performance.md has what each of these brings.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.profilers import PassThroughProfiler
from typing_extensions import override

TRAINING_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""What Lightning calls in each training step, of every callback and of the module."""
EVALUATION_HOOKS = (
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_batch_start",
    "on_test_batch_end",
)
"""The same for callbacks; of the module's, Lightning reads the signatures."""


class Unprofiled(PassThroughProfiler):
    """Measures nothing, and makes no context manager for each of a step's thirty actions."""

    _nothing = nullcontext()

    @override
    def profile(self, action_name: str) -> Any:
        return self._nothing


def trim(trainer: Any, module: LightningModule) -> None:
    """Leave out the hooks that do nothing, a question that nobody can answer with yes and, unless
    one is asked for, the profiler."""
    for callback in trainer.callbacks:
        skip_empty(callback, Callback, TRAINING_HOOKS + EVALUATION_HOOKS)
    skip_empty(module, LightningModule, TRAINING_HOOKS)
    if type(trainer.profiler) is PassThroughProfiler:
        trainer.profiler = Unprofiled()
    # Before each step of ddp the ranks wait for each other to hear whether Lightning's handler got
    # a signal. StopTogether has put its own in that place, and asks beside the step.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _ask_nobody


def _ask_nobody() -> None:
    pass


def skip_empty(owner: Callback | LightningModule, base: type, hooks: tuple[str, ...]) -> None:
    """Lightning calls no hook that is None; one that is inherited from ``base`` does nothing."""
    for name in hooks:
        if getattr(type(owner), name) is getattr(base, name) and name not in vars(owner):
            setattr(owner, name, None)
