"""Batch sizes: what a person sets is global; what a process loads is derived here, once."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config import DataConfig, Target
from lockstep.errors import UsageError


@dataclass(frozen=True)
class BatchSizes:
    """Samples per step: over all processes (``global_``) and in each process (``per_process``)."""

    global_: int
    per_process: int
    eval_per_process: int
    effective: int
    """Samples per optimizer step: the global batch times the micro-steps accumulated."""


def batch_sizes(data: DataConfig, world_size: int, accumulated: int = 1) -> BatchSizes:
    """Split the global batch over the processes.

    Raises `UsageError`, with two values that work, unless each process gets the same number. The
    batches of an evaluation need not divide: their sizes change no result.
    """
    if data.eval_batch_size is not None and data.eval_batch_size < 1:
        raise UsageError(f"data.eval_batch_size must be positive; got {data.eval_batch_size}.")
    size = data.global_batch_size
    if size < 1 or size % world_size:
        below = max(size // world_size, 1) * world_size
        rule = f"; got {size} and {world_size}" if world_size > 1 else f"; got {size}"
        raise UsageError(
            "data.global_batch_size must be positive and divisible by the number of processes"
            f"{rule}. Use {below} or {below + world_size}."
        )
    evaluation = data.eval_batch_size or size
    return BatchSizes(
        global_=size,
        per_process=size // world_size,
        eval_per_process=-(-evaluation // world_size),
        effective=size * accumulated,
    )


SCALES: dict[str, float] = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}


def scaled_optimizer(optimizer: Target, samples_per_step: int) -> Target:
    """The optimizer's own arguments, with its ``lr`` scaled to the samples per optimizer step.

    ``scale_lr: linear`` multiplies by ``samples_per_step / reference_batch_size`` (Goyal et al.
    2017, arXiv:1706.02677), ``sqrt`` by its root (Krizhevsky 2014, arXiv:1404.5997). Off by
    default: the global batch, and so the best rate, does not change with the devices.

    Raises `UsageError` for another word, a rate that is no number, or a reference that is missing.
    """
    own = dict(optimizer)
    rule, reference = own.pop("scale_lr", "none"), own.pop("reference_batch_size", None)
    rate = own.get("lr", 1.0)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate >= 0:
        raise UsageError(f"optimizer.lr must be a number, 0 or greater; got {rate!r}.")
    if rule not in SCALES:
        raise UsageError(f"optimizer.scale_lr must be one of {', '.join(SCALES)}; got {rule!r}.")
    if rule != "none":
        if not isinstance(reference, int) or reference < 1:
            raise UsageError(
                f"optimizer.scale_lr={rule} needs the batch size that optimizer.lr was found for; "
                f"got optimizer.reference_batch_size={reference}. Use for example 256."
            )
        own["lr"] = rate * (samples_per_step / reference) ** SCALES[rule]
    return own
