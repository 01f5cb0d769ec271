"""From ``find=<name>`` to a task and the config that it runs with. Torch comes in the processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.config import Config
from lockstep.errors import UsageError
from lockstep.find.batch import FindBatch
from lockstep.find.lr import FindRate
from lockstep.record import Task

KINDS: dict[str, type[FindRate | FindBatch]] = {"lr": FindRate, "batch": FindBatch}
"""By the names of the files in ``conf/find/``."""


def finder(config: Config, resumed: bool) -> tuple[Config, Task]:
    """The config without all that only a training needs, and what to do; raises `UsageError`."""
    name = (config.find or {}).get("name")
    if name not in KINDS:
        raise UsageError(
            f"find must be one of {', '.join(KINDS)}; got find.name={name}. Use find=lr."
        )
    try:
        task = KINDS[name](**config.find or {})
    except TypeError as error:
        raise UsageError(
            f"find={name}: {error}. The keys are those of conf/find/{name}.yaml."
        ) from None
    task.check(config)
    if resumed:
        raise UsageError("find and resume exclude each other. Use find=null to go on with a run.")
    if config.trainer.fast_dev_run:
        raise UsageError(
            f"find={name} needs {task.steps} steps; got trainer.fast_dev_run="
            f"{config.trainer.fast_dev_run}. Use trainer.fast_dev_run=false."
        )
    return _only_steps(config, task), task


def _only_steps(config: Config, task: FindRate | FindBatch) -> Config:
    callbacks = {
        name: target
        for name, target in config.callbacks.items()
        if target and target.get("_target_") in task.kept
    }
    trainer = replace(
        config.trainer,
        enable_checkpointing=False,
        limit_val_batches=0,
        max_epochs=-1,
        max_steps=task.steps,
        max_time=None,
        min_epochs=None,
        min_steps=None,
        num_sanity_val_steps=0,
        profiler=None,
    )
    off: dict[str, Any] = {"scheduler": None, "objective": None, "compare": False, "plots": False}
    return replace(config, callbacks=callbacks, logger={}, trainer=trainer, **off)
