"""The networks and data of the comparison, plain torch, the same for both sides."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]
"""Inputs and targets."""
CLASSES, BYTES, WIDTH = 10, 256, 256
SIDE, TOKENS = 32, 64
"""Pixels of an image's side; bytes of a text."""


def resnet18() -> nn.Module:
    """torchvision's own: ``(B, 3, 32, 32)`` to ``(B, 10)``."""
    from torchvision.models import resnet18 as network

    model: nn.Module = network(num_classes=CLASSES)
    return model


class Transformer(nn.Module):
    """A causal language model on bytes: ``(B, T)`` to ``(B, 256, T)``."""

    def __init__(
        self, layers: int = 2, width: int = WIDTH, heads: int = 4, vocabulary: int = BYTES
    ):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1], tokens.device, self.head.weight.dtype
        )
        hidden = self.blocks(self.embed(tokens), mask=mask, is_causal=True)
        return self.head(hidden).transpose(1, 2)


def numbers(samples: int) -> Pair:
    """Inputs ``(n, 10)`` and targets ``(n, 1)``, standard normal: the documents' data."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(samples, 10, generator=draw), torch.randn(samples, 1, generator=draw)


def images(samples: int) -> Pair:
    """Images ``(n, 3, 32, 32)`` and their classes ``(n,)``."""
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randn(samples, 3, SIDE, SIDE, generator=draw)
    return pixels, torch.randint(CLASSES, (samples,), generator=draw)


def texts(samples: int, tokens: int = TOKENS, vocabulary: int = BYTES) -> Pair:
    """Tokens ``(n, T)`` and the ones that follow, ``(n, T)``."""
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randint(vocabulary, (samples, tokens + 1), generator=draw)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
