"""The units of a network, for what gathers or recomputes one of them at a time."""

from __future__ import annotations

from torch import nn


def units_of(module: nn.Module) -> list[str]:
    """Names of the items of each ModuleList; without one, of the network's parts with weights."""
    modules = dict(module.named_modules())
    items = [
        f"{name}.{item}"
        for name, part in modules.items()
        if isinstance(part, nn.ModuleList)
        for item, _ in part.named_children()
    ]
    network = modules.get("network", nn.Module())
    return items or [f"network.{name}" for name in parts_with_weights(network)]


def parts_with_weights(module: nn.Module) -> list[str]:
    """Names of the direct children that have parameters."""
    return [name for name, part in module.named_children() if any(True for _ in part.parameters())]
