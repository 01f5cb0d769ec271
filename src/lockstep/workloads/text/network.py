"""A transformer over bytes that predicts the next one, and one over words that tells a class."""

# B batch, T tokens, D width, H heads, V vocabulary

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from lockstep.errors import UsageError
from lockstep.workloads.text.pieces import PADDING


class Block(nn.Module):
    """Attention, then a layer of ``4 * width`` units, each normalized before and added after.

    Maps ``(B, T, D)`` to the same shape. ``mask``, ``(B, 1, 1, T)``, is true for the tokens that
    may be attended to; None: each token attends to itself and those before it.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_units = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.units = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    @override
    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = hidden + self._attend(self.before_attention(hidden), mask)
        units: Tensor = self.units(self.before_units(hidden))
        return hidden + units

    def _attend(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        batch, tokens, width = hidden.shape
        # A head's query, key and value side by side, so that a rank of tensor parallelism can hold
        # some of the heads: then H is what it holds.
        parts = self.query_key_value(hidden).view(batch, tokens, -1, 3, width // self.heads)
        query, key, value = parts.permute(3, 0, 2, 1, 4)  # each (B, H, T, D / H)
        mixed = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0,
        )
        output: Tensor = self.mix(mixed.transpose(1, 2).flatten(2))
        return output


class ByteTransformer(nn.Module):
    """Maps bytes ``(B, T)`` to the scores ``(B, T, 256)`` of what follows each; T is at most
    ``context``. Padding at the end needs no mask: nothing before it attends to it."""

    VOCABULARY = 256

    def __init__(
        self, context: int, width: int, depth: int, heads: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        check_heads(width, heads)
        self.context = context
        self.bytes = nn.Embedding(self.VOCABULARY, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, self.VOCABULARY)
        self.apply(small_weights)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.score(hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        """``(B, T)`` to ``(B, T, D)``."""
        length = tokens.shape[1]
        if length > self.context:
            raise UsageError(
                f"A sample must fit into model.network.context={self.context}; got {length} bytes. "
                f"Use data.datasets.context={self.context}, or a larger model.network.context."
            )
        hidden: Tensor = self.bytes(tokens) + self.places.weight[:length]
        return hidden

    def score(self, hidden: Tensor) -> Tensor:
        """``(B, T, D)`` to ``(B, T, V)``."""
        scores: Tensor = self.scores(self.norm(hidden))
        return scores

    def pipeline_parts(self) -> list[Any]:
        """In the order of `forward`: modules, or a function and the modules that it uses."""
        start, end = [self.bytes, self.places], [self.norm, self.scores]
        return [(self.embed, start), *self.blocks, (self.score, end)]

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Heads, units, bytes and scores are shared out; places and norms are on every rank."""
        return {
            "bytes": "rows",
            "blocks.*.query_key_value": "outputs",
            "blocks.*.mix": "inputs",
            "blocks.*.units.0": "outputs",
            "blocks.*.units.2": "inputs",
            "scores": "outputs_gathered",
        }


class TextClassifier(nn.Module):
    """Maps word numbers ``(B, T)``, `PADDING` at the end, to the scores ``(B, classes)``.

    The mean over the words, after ``depth`` blocks of attention; none: a bag of words. There are no
    places in it, so that it takes any T. Padding is left out of attention and mean.
    """

    def __init__(
        self, buckets: int, classes: int, width: int, depth: int, heads: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        check_heads(width, heads)
        self.words = nn.Embedding(buckets, width, padding_idx=PADDING)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, classes)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        held = tokens != PADDING
        hidden = self.drop(self.words(tokens))
        for block in self.blocks:
            hidden = block(hidden, held[:, None, None, :])
        # A product, not a selection: shapes must not depend on values, for torch.compile.
        total = (hidden * held[..., None]).sum(1)
        scores: Tensor = self.scores(self.norm(total / held.sum(1, keepdim=True)))
        return scores


def check_heads(width: int, heads: int) -> None:
    if width % heads:
        below = max(width // heads, 1) * heads
        raise UsageError(
            "model.network.width must be divisible by model.network.heads; got "
            f"{width} and {heads}. Use {below} or {below + heads}."
        )


def small_weights(part: nn.Module) -> None:
    """Normal with deviation 0.02, as GPT-2 starts: torch's own deviation for embeddings is 1."""
    if isinstance(part, nn.Linear | nn.Embedding):
        nn.init.normal_(part.weight, std=0.02)
    if isinstance(part, nn.Linear):
        assert part.bias is not None
        torch.nn.init.zeros_(part.bias)
