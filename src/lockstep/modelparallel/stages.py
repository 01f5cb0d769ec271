"""Which consecutive parts of a network make up the stage of each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lockstep.errors import UsageError


@dataclass(frozen=True)
class Part:
    """A step of a network, ``(B, ...)`` to ``(B, ...)``, and the modules with its weights."""

    compute: Callable[[Tensor], Tensor]
    modules: Sequence[nn.Module]

    @property
    def weights(self) -> int:
        return sum(item.numel() for module in self.modules for item in module.parameters())


def parts_of(network: Any) -> list[Part]:
    """What the network's ``pipeline_parts`` says: modules, or pairs of a function and its modules.

    Raises `UsageError` for a network that has none, or whose parts do not hold all its weights.
    """
    told = getattr(network, "pipeline_parts", None)
    if told is None:
        raise UsageError(
            f"trainer.strategy=pipeline must know the parts of {type(network).__name__}, one after "
            "another; it has no pipeline_parts. Give it one (docs/model-parallel.md), or use "
            "trainer.strategy=fsdp."
        )
    parts = [
        Part(item, [item]) if isinstance(item, nn.Module) else Part(item[0], item[1])
        for item in told()
    ]
    held = {id(item) for part in parts for module in part.modules for item in module.parameters()}
    left = [name for name, item in network.named_parameters() if id(item) not in held]
    if left:
        raise UsageError(
            f"pipeline_parts must hold all weights of {type(network).__name__}; left out: "
            f"{', '.join(left[:3])}. Add them to the part that uses them."
        )
    return parts


def stages_of(parts: Sequence[Part], count: int) -> list[list[Part]]:
    """Cut into ``count`` stages of consecutive parts, the largest as small as it can be.

    Raises `UsageError` when there are fewer parts with weights than stages.
    """
    heavy = sum(1 for part in parts if part.weights)
    if heavy < count:
        raise UsageError(
            "trainer.strategy=pipeline needs a part with weights for each process; got "
            f"{heavy} parts and {count} processes. Use trainer.devices={heavy}, or more layers."
        )
    limits = sorted(
        {
            sum(part.weights for part in parts[first : last + 1])
            for first in range(len(parts))
            for last in range(first, len(parts))
        }
    )
    limit = next(each for each in limits if len(_filled(parts, each)) <= count)
    stages = _filled(parts, limit)
    while len(stages) < count:
        _halve(stages)
    return stages


def _filled(parts: Sequence[Part], limit: int) -> list[list[Part]]:
    """Stages of at most ``limit`` weights where a part is not larger, each as full as it can be."""
    stages: list[list[Part]] = [[]]
    for part in parts:
        held = sum(item.weights for item in stages[-1])
        if stages[-1] and part.weights and held + part.weights > limit:
            stages.append([])
        stages[-1].append(part)
    return stages


def _halve(stages: list[list[Part]]) -> None:
    """Cut the heaviest stage that has two parts with weights before the last of them."""
    several = [stage for stage in stages if sum(1 for part in stage if part.weights) > 1]
    stage = max(several, key=lambda stage: sum(part.weights for part in stage))
    last = max(index for index, part in enumerate(stage) if part.weights)
    place = stages.index(stage)
    stages[place : place + 1] = [stage[:last], stage[last:]]
