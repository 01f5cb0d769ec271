"""Where the held-out item stands among all candidates: hit rate and NDCG, exact over ranks.

Sums over users, which ranks add up once. torchmetrics' retrieval metrics keep every score of every
user until the end instead, here 1.6 million numbers, and gather them on each rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lockstep.epoch_mean import SUMS


def places(scores: Tensor, target: Tensor) -> Tensor:
    """Scores ``(B, I + 1)`` and items ``(B,)`` to places ``(B,)``, the best being 1.

    Equal scores stand before the target, so that a constant is no good answer; items that are no
    candidates have the score -inf. Column 0 is no item; a target that is not in training has no
    score, and stands behind all.
    """
    of_target = scores.gather(1, target[:, None])
    place = (scores[:, 1:] >= of_target).sum(1)
    return torch.where(target == 0, scores.shape[1], place)


class HitRate(Metric):
    """The share of samples whose item is among the first ``k``."""

    full_state_update = False
    hits: Tensor
    samples: Tensor

    def __init__(self, k: int = 10) -> None:
        super().__init__()
        self.k = k
        self.add_state("hits", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("samples", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, scores: Tensor, target: Tensor) -> None:
        self.hits += (places(scores, target) <= self.k).sum()
        self.samples += len(target)

    @override
    def compute(self) -> Tensor:
        return self.hits.to(SUMS) / self.samples


class NDCG(Metric):
    """The mean of ``1 / log2(1 + place)`` where the item is among the first ``k``, else 0.

    With one relevant item the ideal is 1 (Jarvelin and Kekalainen 2002). ``gain`` is no name of
    `HitRate`'s state on purpose: a MetricCollection computes metrics as one when their states agree
    after the first batch, as they would at 0.
    """

    full_state_update = False
    gain: Tensor
    samples: Tensor

    def __init__(self, k: int = 10) -> None:
        super().__init__()
        self.k = k
        self.add_state("gain", torch.zeros((), dtype=SUMS), dist_reduce_fx="sum")
        self.add_state("samples", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, scores: Tensor, target: Tensor) -> None:
        place = places(scores, target)
        self.gain += torch.where(place <= self.k, 1 / torch.log2(1.0 + place.to(SUMS)), 0.0).sum()
        self.samples += len(target)

    @override
    def compute(self) -> Tensor:
        return self.gain / self.samples
