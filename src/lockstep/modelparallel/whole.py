"""Between tensors that are spread over ranks and plain ones, as checkpoints hold them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map


def whole(state: Any, keep: bool) -> Any:
    """The same nesting with each spread tensor put together, on the CPU; all ranks call this.

    ``keep``: this rank needs it. The others get None in the place of a tensor, so that no more
    than one of them holds more than one whole tensor at a time.
    """

    def gathered(leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            leaf = leaf.full_tensor()
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().cpu() if keep else None

    return tree_map(gathered, state)


def cut(value: Any, like: Any) -> Any:
    """This rank's part of a plain tensor, spread as ``like`` is; without any exchange."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    on_device = value.to(like.device_mesh.device_type)
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)


def cut_state(optimizer: Optimizer) -> None:
    """Spread what an optimizer has loaded for its parameters as these are."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            state[key] = cut(value, parameter)


def local(tensor: Tensor) -> Tensor:
    """The storage that this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def norm(gradients: Iterable[Tensor]) -> Tensor:
    """The 2-norm over all of them, a plain 0-dim tensor, the same on every rank.

    torch's own takes tensors of one mesh only. Those of a kind are taken together, so that there
    is an exchange per kind and not per tensor.
    """
    kinds: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        kind: Any = None
        if isinstance(gradient, DTensor):
            kind = gradient.device_mesh, gradient.placements
        kinds.setdefault(kind, []).append(gradient)
    norms = [whole_number(torch.nn.utils.get_total_norm(kind)) for kind in kinds.values()]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def whole_number(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
