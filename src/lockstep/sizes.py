"""Batch sizes: what a person sets is global; what a process loads is derived here, once."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config import DataConfig
from lockstep.errors import UsageError


@dataclass(frozen=True)
class BatchSizes:
    """Samples per step: over all processes (``global_``) and in each process (``per_process``)."""

    global_: int
    per_process: int
    eval_global: int
    eval_per_process: int


def batch_sizes(data: DataConfig, world_size: int) -> BatchSizes:
    """Split the global batch over the processes.

    Raises `UsageError`, with two values that work, unless each process gets the same number. The
    batches of an evaluation need not divide: their sizes change no result.
    """
    if data.eval_batch_size is not None and data.eval_batch_size < 1:
        raise UsageError(f"data.eval_batch_size must be positive; got {data.eval_batch_size}.")
    size = data.global_batch_size
    if size < 1 or size % world_size:
        below = max(size // world_size, 1) * world_size
        raise UsageError(
            "data.global_batch_size must be positive and divisible by the number of processes; "
            f"got {size} and {world_size}. Use {below} or {below + world_size}."
        )
    evaluation = data.eval_batch_size or size
    return BatchSizes(size, size // world_size, evaluation, -(-evaluation // world_size))
