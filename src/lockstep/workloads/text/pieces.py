"""Samples of unequal length, cut from one long row of tokens and padded batch by batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lockstep.data.tensors import Tensors

IGNORED = -100
"""A target that is padding; what `torch.nn.CrossEntropyLoss` leaves out."""
PADDING = 0


class Pieces(Tensors):
    """Piece i is ``tokens[starts[i] : starts[i] + lengths[i]]``; its label is ``labels[i]``.

    A batch is ``(tokens (B, T), labels (B,))``, where T is the longest of the B pieces and shorter
    ones end with `PADDING`. Which pieces make up a batch is the sampler's choice, so that it
    depends on no rank; how long T is depends on the rank, and nothing may depend on T.
    """

    def __init__(self, tokens: Tensor, starts: Tensor, lengths: Tensor, labels: Tensor) -> None:
        super().__init__(starts, lengths, labels)
        assert len(lengths) == 0 or int(lengths.min()) > 0, "an empty piece has no prediction"
        self.tokens, self.starts, self.lengths, self.labels = tokens, starts, lengths, labels

    @override
    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        rows = torch.as_tensor(indices, dtype=torch.int64)
        places, held = self._places(rows)
        return self.tokens[places].long().masked_fill(~held, PADDING), self.labels[rows]

    def _places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Where in ``tokens`` the batch's ``(B, T)`` tokens are, and which of these are no padding.

        A place that is padding is that of the piece's last token.
        """
        lengths = self.lengths[rows, None]
        columns = torch.arange(int(lengths.max()))
        return self.starts[rows, None] + columns.minimum(lengths - 1), columns < lengths


class Continuations(Pieces):
    """Pieces whose every token is to be followed by the next one of the text.

    A batch is ``(inputs (B, T), targets (B, T))``: ``targets[:, t]`` comes after ``inputs[:, t]``,
    and is `IGNORED` where the input is padding. So a piece's last target is the first token of
    what follows it, and a text of n tokens that is cut without gaps has n - 1 targets, each once.
    """

    def __init__(self, tokens: Tensor, starts: Tensor, lengths: Tensor) -> None:
        super().__init__(tokens, starts, lengths, starts)

    @override
    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        places, held = self._places(torch.as_tensor(indices))
        inputs, targets = self.tokens[places].long(), self.tokens[places + 1].long()
        return inputs.masked_fill(~held, PADDING), targets.masked_fill(~held, IGNORED)


def by_length(starts: Tensor, lengths: Tensor) -> Tensor:
    """An order in which neighbours are of similar length, so that little is padding."""
    order: Tensor = torch.argsort(lengths * (int(starts.max()) + 1) + starts)
    return order
