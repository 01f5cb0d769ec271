"""Gradient clipping when a rank holds a part of the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lockstep.modelparallel.whole import local

Norm = Callable[[Iterable[Tensor]], Tensor]


class _ClipsWhole(Precision):
    """In front of the class of a precision plugin, which Lightning chooses by its name."""

    norm: Norm

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        gradients = _gradients(self, optimizer)
        # As torch.nn.utils.clip_grad_norm_ has it.
        scale = torch.clamp(clip_val / (self.norm(gradients) + 1e-6), max=1.0)
        for gradient in gradients:
            local(gradient).mul_(scale)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        for gradient in _gradients(self, optimizer):
            local(gradient).clamp_(-clip_val, clip_val)


def _gradients(plugin: Precision, optimizer: Optimizer) -> list[Tensor]:
    parameters = plugin.main_params(optimizer)
    return [item.grad for item in parameters if item.grad is not None]


def clip_whole(plugin: Precision, norm: Norm) -> None:
    """Make ``plugin`` clip by the norm over all ranks' gradients, which ``norm`` computes."""
    if not isinstance(plugin, _ClipsWhole):
        plugin.__class__ = type(type(plugin).__name__, (_ClipsWhole, type(plugin)), {})
    plugin.norm = norm  # type: ignore[attr-defined]
