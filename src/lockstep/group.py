"""What ranks exchange beside gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed


def gather(value: Any) -> list[Any]:
    """The value of each rank, in rank order, on every rank."""
    if not in_group():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def in_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def leave_group() -> None:
    """End the process group in order, after success only.

    Without this about one gloo run in twenty aborts while its threads meet the interpreter's end;
    after an error it can hang (https://github.com/pytorch/pytorch/issues/190489).
    """
    if in_group():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
