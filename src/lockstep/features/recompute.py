"""Activation checkpointing: less memory for one more forward pass."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lockstep.errors import UsageError
from lockstep.units import units_of


class Recompute(Callback):
    """Keep the inputs of some parts only, and compute them again in the backward pass.

    ``parts`` are names of modules, with ``*``, such as ``network.blocks.*``. None: the items of
    each ModuleList or, where there is none, the network's children that have weights. Dropout draws
    the same again (Chen et al. 2016, arXiv:1604.06174; `torch.utils.checkpoint`).

    Raises `UsageError` for a pattern that no module has, and for parts with BatchNorm, whose
    running statistics would count each batch twice.
    """

    def __init__(self, parts: list[str] | None = None) -> None:
        self.parts = parts

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            for name in chosen(pl_module, self.parts):
                recompute(name, pl_module.get_submodule(name))


def chosen(module: nn.Module, patterns: list[str] | None) -> list[str]:
    """Names of the parts; none is inside of another."""
    modules = dict(module.named_modules())
    if patterns is None:
        found = units_of(module)
        patterns = ["network.*"]
    else:
        found = [name for name in modules if any(fnmatch(name, each) for each in patterns)]
    found = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    if not found:
        raise UsageError(
            "callbacks.recompute.parts must name modules with weights; none is like "
            f"{', '.join(patterns)}. There are: {', '.join(name for name in modules if name)}."
        )
    return found


class _Recomputed(nn.Module):
    """In front of a part's own class, so that copies for dp's replicas have it too."""

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)


def recompute(name: str, part: nn.Module) -> None:
    """Change the class of ``part``; its parameters keep their names."""
    if isinstance(part, _Recomputed):
        return
    if any(isinstance(inner, _BatchNorm) for inner in part.modules()):
        raise UsageError(
            "callbacks.recompute.parts must hold no BatchNorm, whose running statistics would "
            f"count each batch twice; got {name}. Name parts without one, or use GroupNorm."
        )
    part.__class__ = type(type(part).__name__, (_Recomputed, type(part)), {})
