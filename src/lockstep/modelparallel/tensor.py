"""Tensor parallelism: the ranks that share a sample hold parts of each large layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from lockstep.errors import UsageError

WORDS: dict[str, Callable[[], ParallelStyle]] = {
    "outputs": ColwiseParallel,
    "inputs": RowwiseParallel,
    "outputs_gathered": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rows": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""``outputs``: each rank computes some of a Linear's outputs, and keeps them to itself. ``inputs``:
each takes some of the inputs, those that the layer before has kept, and the results are summed over
the ranks. ``outputs_gathered``: as outputs, and each rank gets all. ``rows``: an Embedding whose
rows are shared out, the results summed (Shoeybi et al. 2019, arXiv:1909.08053)."""
DIMENSION = {"outputs": 0, "inputs": 1, "outputs_gathered": 0, "rows": 0}
"""Of ``weight``, along which it is cut."""


def split_layers(module: nn.Module, plan: Mapping[str, str] | None, mesh: DeviceMesh) -> None:
    """Split the layers that ``plan`` names; None: the plan that the network itself has.

    Layers that it does not name are whole on every rank. Raises `UsageError` for a plan that is
    missing or names nothing, a word that there is not, and a size that does not divide.
    """
    words = planned(module, plan)
    for name, word in words.items():
        layer = module.get_submodule(name)
        if word not in WORDS:
            raise UsageError(
                f"strategy.options.plan must say one of {', '.join(WORDS)} of each layer; "
                f"got {name}: {word!r}."
            )
        _check_divisible(name, layer, word, mesh.size())
        parallelize_module(layer, mesh, WORDS[word]())


def planned(module: nn.Module, plan: Mapping[str, str] | None) -> dict[str, str]:
    """Name of each layer -> its word, in the module's order."""
    if plan is None:
        network: Any = getattr(module, "network", None)
        own = getattr(network, "tensor_parallel_plan", None)
        if own is None:
            raise UsageError(
                f"trainer.strategy=tensor_parallel must know how {type(network).__name__} is "
                "split; it has no tensor_parallel_plan. Give it one, or say "
                f"'strategy.options.plan={{<layer>: {'|'.join(WORDS)}}}'; docs/model-parallel.md."
            )
        plan = {f"network.{name}": word for name, word in own().items()}
    names = [name for name, part in module.named_modules() if name and hasattr(part, "weight")]
    found: dict[str, str] = {}
    for pattern, word in plan.items():
        layers = [name for name in names if fnmatch(name, pattern)]
        if not layers:
            raise UsageError(
                f"strategy.options.plan must name layers with a weight; none is like {pattern}. "
                f"There are: {', '.join(names)}."
            )
        found |= dict.fromkeys(layers, word)
    return found


def _check_divisible(name: str, layer: nn.Module, word: str, ranks: int) -> None:
    if not isinstance(layer, nn.Embedding if word == "rows" else nn.Linear):
        raise UsageError(
            f"strategy.options.plan splits a Linear, or by rows an Embedding; {name} is a "
            f"{type(layer).__name__}, and was to be split by {word}."
        )
    size = layer.weight.shape[DIMENSION[word]]
    if size % ranks:
        below = max(size // ranks, 1) * ranks
        raise UsageError(
            f"What is split must be divisible by the processes that share it; {name} has {size} "
            f"{word} and {ranks} processes. Use {below} or {below + ranks}, or leave it out of "
            "strategy.options.plan."
        )
