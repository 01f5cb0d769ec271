"""Where embeddings may have sparse gradients; docs/workloads/recsys.md has the measurements."""

from __future__ import annotations

import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from lockstep.errors import UsageError

REPAIR = (
    "Use model.network.sparse=false, or optimizer._target_=torch.optim.Adagrad "
    "++optimizer.weight_decay=0."
)


def refuse_sparse(network: nn.Module, optimizer: Optimizer, trainer: Trainer) -> None:
    """Refuse by name what torch refuses in the first step only, or for one parameter only.

    Of torch's optimizers SGD, Adagrad and SparseAdam take sparse gradients, the first two without
    weight decay (it would touch every row), the last one nothing but sparse ones.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, SGD | Adagrad | SparseAdam):
        raise UsageError(
            "model.network.sparse=true needs an optimizer that takes sparse gradients: SGD, "
            f"Adagrad or SparseAdam; got {name}. {REPAIR}"
        )
    if decay := [group["weight_decay"] for group in optimizer.param_groups if _decays(group)]:
        raise UsageError(
            "model.network.sparse=true takes no weight decay, which would touch every row; got "
            f"optimizer.weight_decay={decay[0]}. {REPAIR}"
        )
    dense = [part for part in network.modules() if isinstance(part, nn.Linear)]
    if isinstance(optimizer, SparseAdam) and dense:
        raise UsageError(
            f"SparseAdam takes no dense gradients, and {type(network).__name__} has dense layers "
            f"beside its tables. {REPAIR}"
        )
    if trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm == "value":
        raise UsageError(
            "model.network.sparse=true cannot be clipped by value; got "
            "trainer.gradient_clip_algorithm=value. Use trainer.gradient_clip_algorithm=norm."
        )
    device = trainer.strategy.root_device.type
    if device != "cpu" and trainer.num_devices * trainer.num_nodes > 1:
        raise UsageError(
            "model.network.sparse=true works on one device or on CPUs, where gloo exchanges sparse "
            f"gradients, as NCCL does not; got {trainer.num_devices} devices of type {device}. "
            "Use model.network.sparse=false, or trainer.devices=1."
        )
    # Not to check is the default; torch warns of it until it was said.
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]


def _decays(group: dict[str, object]) -> bool:
    return bool(group.get("weight_decay"))
