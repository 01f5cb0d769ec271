"""The communication hooks that ``strategy.options.hook`` may name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)

from lockstep.errors import UsageError, did_you_mean

Hook = Callable[[Any, Any], Any]
HOOKS: dict[str, tuple[Any, Hook]] = {
    "fp16": (None, fp16_compress_hook),
    "bf16": (None, bf16_compress_hook),
}
"""Name -> state and hook, for `DistributedDataParallel.register_comm_hook`. These two send half of
the bytes of float32; fp16 has the finer steps, bf16 the range of float32.
https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html"""


def hook_of(name: str | None, options: dict[str, Any]) -> tuple[Any, Hook] | None:
    """State and hook; None: DDP's own all-reduce. Raises `UsageError` for what there is not."""
    if name is not None and name not in HOOKS:
        known = [*HOOKS, "power_sgd"]
        raise UsageError(
            f"strategy.options.hook must be one of {', '.join(known)} or null; got {name!r}."
            f"{did_you_mean(name, known)}"
        )
    if options:
        raise UsageError(
            f"strategy.options.hook={name} takes no hook_options; got {options}. Remove them."
        )
    return None if name is None else HOOKS[name]
