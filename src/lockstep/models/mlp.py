"""A multilayer perceptron."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from typing_extensions import override


class MLP(nn.Module):
    """``depth`` hidden layers of ``width`` units with ReLU, then a linear layer.

    Maps ``(B, features)`` to ``(B, outputs)``.
    """

    def __init__(self, features: int, outputs: int, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        sizes = [features, *[width] * depth]
        hidden = [
            layer
            for before, after in pairwise(sizes)
            for layer in (nn.Linear(before, after), nn.ReLU())
        ]
        self.layers = nn.Sequential(*hidden, nn.Linear(sizes[-1], outputs))

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers(inputs)
        return output
