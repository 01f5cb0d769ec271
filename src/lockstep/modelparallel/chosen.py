"""Strategy name and options -> the strategy of a model-parallel run."""

from __future__ import annotations

import inspect
from datetime import timedelta

from lightning.pytorch.strategies import Strategy

from lockstep.config import Config
from lockstep.errors import UsageError
from lockstep.modelparallel.fsdp import ShardedStrategy, TensorParallelStrategy
from lockstep.modelparallel.mesh import mesh_of
from lockstep.modelparallel.pipeline import PipelineStrategy
from lockstep.modelparallel.strategy import SplitStrategy
from lockstep.placement import Placement

CLASSES: dict[str, type[SplitStrategy]] = {
    "fsdp": ShardedStrategy,
    "tensor_parallel": TensorParallelStrategy,
    "pipeline": PipelineStrategy,
}


def model_parallel(config: Config, placement: Placement) -> Strategy:
    """Raises `UsageError` for an option that the strategy does not have."""
    if placement.strategy == "deepspeed":
        from lockstep.modelparallel.deepspeed import deepspeed

        return deepspeed(config)
    options = dict(config.strategy.options)
    mesh = mesh_of(config, placement)
    chosen = CLASSES[placement.strategy]
    if chosen is not PipelineStrategy:
        options.pop("tensor_parallel_size", None)
    known = set(inspect.signature(chosen.__init__).parameters) - {"self", "mesh", "kwargs"}
    for key in options:
        if key not in known:
            there = sorted(known | ({"tensor_parallel_size"} - {*options}))
            raise UsageError(
                f"strategy.options.{key} is no option of trainer.strategy={placement.strategy}. "
                f"There are: {', '.join(there)}."
            )
    return chosen(mesh, timeout=timedelta(seconds=config.strategy.timeout_s), **options)
