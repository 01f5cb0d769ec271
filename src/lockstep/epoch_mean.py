"""The mean of a loss over all samples of an epoch, on all ranks, exact for unequal batches."""

from __future__ import annotations

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor


class EpochMean:
    """Sums per step without waiting for the device; exchanges two numbers per epoch.

    Not ``self.log(sync_dist=True)`` of batch means: over gloo Lightning averages the sample counts
    as integers, so 51 + 50 samples on two ranks divide by 50. Not a torchmetrics ``MeanMetric``:
    its checks cost more than a small model's step.
    """

    def __init__(self) -> None:
        self._total: Tensor | float = 0.0
        self._samples = 0
        self.samples_seen = 0
        """Samples of the last whole epoch, over all ranks."""

    def add(self, mean: Tensor, samples: int) -> None:
        """Add one batch's mean, a 0-dim tensor, over ``samples`` samples."""
        self._total = self._total + mean.detach().double() * samples
        self._samples += samples

    def reduce_and_reset(self, strategy: Strategy) -> Tensor:
        """The mean over all ranks, a 0-dim float64 tensor on the root device."""
        sums = torch.tensor([0.0, self._samples], dtype=torch.float64, device=strategy.root_device)
        sums[0] = self._total
        total, samples = strategy.reduce(sums, reduce_op="sum")
        self._total, self._samples = 0.0, 0
        self.samples_seen = int(samples)
        return total / samples
