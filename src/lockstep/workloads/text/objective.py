"""A loss that is the mean over tokens, exact when ranks hold unequal numbers of them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics import Metric
from typing_extensions import override

from lockstep.epoch_mean import SUMS
from lockstep.module import Batch, SupervisedModule
from lockstep.strategies.exact_ddp import batch_weight
from lockstep.workloads.text.pieces import IGNORED


class TokenMeanModule(SupervisedModule):
    """``loss(scores (N, V), targets (N,))`` is a mean over the tokens that are not `IGNORED`.

    A batch is ``(*inputs, targets (B, T))``. The gradient is that of the mean over all tokens of
    the global batch, and an epoch's loss is the mean over its tokens; ``samples_seen`` in
    result.json counts tokens. With ``trainer.accumulate_grad_batches`` an optimizer step takes the
    mean over its global batches, each counting the same, as everywhere in torch.
    """

    @override
    def predict_and_loss(self, batch: Batch) -> tuple[Any, Tensor, int]:
        """Return the scores, the mean loss (a 0-dim tensor) and the number of tokens."""
        *inputs, targets = batch
        scores = self(*inputs)
        loss = self.loss(scores.flatten(0, 1), targets.flatten())
        return scores, loss, int((targets != IGNORED).sum())

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        scores, loss, tokens = self.predict_and_loss(batch)
        if self._unchecked:
            self._unchecked = False
            self._check_mean(scores.flatten(0, 1), batch[-1].flatten(), loss)
        weight = batch_weight(self.trainer)
        self.train_loss.update(loss, tokens if weight else 0)
        return loss * self._counts(tokens, weight)

    def _counts(self, tokens: int, weight: float) -> float:
        """What this rank's mean counts, apart from ``weight``, which the strategy multiplies by.

        DDP averages over W ranks, so a mean over n of the global batch's N tokens must count
        n * W / N; the strategy knows samples only. N is known before the backward pass by summing
        one number over the ranks. All of them step together, so none waits in vain.
        """
        if self.trainer.world_size == 1:
            return 1.0
        total = torch.tensor(tokens if weight else 0, device=self.device)
        torch.distributed.all_reduce(total)
        return tokens * self.trainer.world_size / (int(total) * weight) if weight else 0.0

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """For each sample its tokens, ``(B,)``, and their bits together: scores of all tokens would
        be 256 numbers for each byte, and samples are not equally long."""
        *inputs, targets = batch
        bits = nats_of(self(*inputs), targets).sum(1) / math.log(2)
        return {"bits": bits, "tokens": (targets != IGNORED).sum(1)}


def nats_of(scores: Tensor, targets: Tensor) -> Tensor:
    """What each token costs, ``(B, T)``; 0 where it is `IGNORED`. Not in half precision."""
    precise = scores.to(torch.promote_types(scores.dtype, torch.float32))
    nats = cross_entropy(precise.flatten(0, 1), targets.flatten(), reduction="none")
    return nats.view_as(targets)


class BitsPerByte(Metric):
    """How many bits a byte costs when it is coded by the predicted probabilities; 8 is guessing.

    Takes scores ``(B, T, V)`` and targets ``(B, T)``; those that are `IGNORED` do not count.
    """

    full_state_update = False
    nats: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", torch.zeros((), dtype=SUMS), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, scores: Tensor, targets: Tensor) -> None:
        self.nats += nats_of(scores, targets).sum().to(SUMS)
        self.count += (targets != IGNORED).sum()

    @override
    def compute(self) -> Tensor:
        return self.nats / self.count / math.log(2)
