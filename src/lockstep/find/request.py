"""From ``find=<name>`` to a task and the config that it runs with. Torch comes in the processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lockstep.config import Config
from lockstep.errors import UsageError
from lockstep.record import Run, Task
from lockstep.results import Result

KEPT = ("lockstep.features.recompute.Recompute",)
"""Callbacks that change how a step is computed. The others watch, save or stop a training."""
OF_OTHER_STEPS = ("ddp_async", "local_sgd", "fsdp", "tensor_parallel", "pipeline")
"""Strategies whose steps are not one device's, or that hold no whole network in a rank."""


@dataclass(frozen=True)
class FindRate:
    """A rate for ``optimizer.lr``; the arguments are those of Lightning's ``Tuner.lr_find``."""

    min_lr: float
    max_lr: float
    num_training: int
    early_stop_threshold: float | None

    title = "finding a learning rate"

    def __call__(self, built: Any, run: Run, /) -> Result:
        from lockstep.find.rate import find_rate

        return find_rate(self, built, run)

    def check(self) -> None:
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


def finder(config: Config, resumed: bool) -> tuple[Config, Task]:
    """The config without all that only a training needs, and what to do; raises `UsageError`."""
    asked = dict(config.find or {})
    name = asked.pop("name", None)
    if name != "lr":
        raise UsageError(f"find must be one of lr; got find.name={name}. Use find=lr.")
    try:
        task = FindRate(**asked)
        task.check()
    except TypeError as error:
        raise UsageError(f"find=lr: {error}. The keys are those of conf/find/lr.yaml.") from None
    if resumed:
        raise UsageError("find and resume exclude each other. Use find=null to go on with a run.")
    trainer = config.trainer
    if trainer.strategy in OF_OTHER_STEPS:
        raise UsageError(
            f"find=lr looks for the rate of one device; got trainer.strategy={trainer.strategy}. "
            "Use trainer.strategy=ddp, or auto on one device, with the same global batch."
        )
    if trainer.fast_dev_run:
        raise UsageError(
            f"find=lr needs {task.num_training} steps; got trainer.fast_dev_run="
            f"{trainer.fast_dev_run}. Use trainer.fast_dev_run=false."
        )
    return _only_steps(config, task.num_training), task


def _only_steps(config: Config, steps: int) -> Config:
    callbacks = {
        name: target
        for name, target in config.callbacks.items()
        if target and target.get("_target_") in KEPT
    }
    trainer = replace(
        config.trainer,
        enable_checkpointing=False,
        limit_val_batches=0,
        max_epochs=-1,
        max_steps=steps,
        max_time=None,
        min_epochs=None,
        min_steps=None,
        num_sanity_val_steps=0,
        profiler=None,
    )
    off: dict[str, Any] = {"scheduler": None, "objective": None, "compare": False, "plots": False}
    return replace(config, callbacks=callbacks, logger={}, trainer=trainer, **off)
