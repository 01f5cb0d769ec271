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

    def pipeline_parts(self) -> list[nn.Module]:
        return list(self.layers)

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Linear layers in pairs: the first keeps its outputs, of which the second takes its
        inputs. One that is left over is whole on every rank."""
        linear = [f"layers.{2 * index}" for index in range((len(self.layers) + 1) // 2)]
        pairs = zip(linear[::2], linear[1::2], strict=False)
        return {
            name: word
            for pair in pairs
            for name, word in zip(pair, ("outputs", "inputs"), strict=True)
        }
