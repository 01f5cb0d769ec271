"""Tensors that go from one stage to the next, and gradients that come back, inside autograd.

Each step of the forward pass has its counterpart in the backward pass. Autograd runs what was made
last first, so micro-batches come back in the opposite order, on every rank alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HEADER = 8
"""int64 numbers before each tensor: its type, its dimensions, its shape."""


def header_of(tensor: Tensor) -> Tensor:
    shape = list(tensor.shape)
    numbers = [DTYPES.index(tensor.dtype), len(shape), *shape]
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)), device=tensor.device)


def empty_for(header: Tensor) -> Tensor:
    kind, dimensions, *shape = header.tolist()
    return torch.empty(shape[:dimensions], dtype=DTYPES[kind], device=header.device)


class Send(Function):
    """To rank ``to``; returns a 0-dim tensor through which the backward pass finds its way."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, to: int) -> Tensor:
        ctx.to, ctx.like = to, hidden.detach()
        dist.send(header_of(hidden), to)
        dist.send(hidden.detach().contiguous(), to)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        gradient = torch.empty_like(ctx.like, memory_format=torch.contiguous_format)
        dist.recv(gradient, ctx.to)
        return gradient, None


class Receive(Function):
    """From rank ``source``. ``anchor`` requires a gradient, so that there is a backward pass."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, source: int) -> Tensor:
        ctx.source = source
        header = torch.empty(HEADER, dtype=torch.int64, device=anchor.device)
        dist.recv(header, source)
        hidden = empty_for(header)
        dist.recv(hidden, source)
        return hidden

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        dist.send(gradient.contiguous(), ctx.source)
        return None, None


class Deliver(Function):
    """The last rank's outputs, ``(B, ...)``, on every rank: all of them compute loss and metrics.

    ``parts`` are the micro-batches' outputs on the last rank, what `Send` returned on the others,
    to which no gradient flows but that of the rank behind.
    """

    @staticmethod
    def forward(ctx: Any, last: int, *parts: Tensor) -> Tensor:
        ctx.sizes = [len(part) for part in parts] if dist.get_rank() == last else None
        ctx.parts = len(parts)
        if ctx.sizes is not None:
            output = torch.cat(parts)
            header = header_of(output)
        else:
            header = torch.empty(HEADER, dtype=torch.int64, device=parts[0].device)
        dist.broadcast(header, last)
        if ctx.sizes is None:
            output = empty_for(header)
        dist.broadcast(output, last)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sizes is not None:
            return None, *torch.split(gradient, ctx.sizes)
        return None, *([gradient.new_zeros(())] * ctx.parts)
