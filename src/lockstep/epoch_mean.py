"""The mean of a loss over all samples of an epoch, on all ranks, exact for unequal batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

SUMS = torch.float32 if torch.backends.mps.is_available() else torch.float64
"""float64, so that the order of summation does not show; Apple's GPUs have none."""


class EpochMean(Metric):
    """Sums per step without waiting for the device; exchanges two numbers per epoch.

    Not ``self.log(sync_dist=True)`` of batch means: over gloo Lightning averages the sample counts
    as integers, so 51 + 50 samples on two ranks divide by 50. Not a ``MeanMetric``: it looks for
    NaN in each update, and its float32 sums drift.
    """

    full_state_update = False
    total: Tensor
    samples: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=SUMS), dist_reduce_fx="sum")
        self.add_state("samples", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.samples_seen = 0
        """Samples of the last whole epoch, over all ranks."""

    @override
    def update(self, mean: Tensor, samples: int) -> None:
        """Add one batch's mean, a 0-dim tensor, over ``samples`` samples."""
        # In place: an assignment to a module's attribute takes longer than the sum.
        self.total.add_(mean.detach().to(SUMS), alpha=samples)
        self.samples.add_(samples)

    def resume(self, total: float, samples: int) -> None:
        """Go on from the sums of an epoch that was interrupted."""
        self.total.fill_(total)
        self.samples.fill_(samples)
        self._update_count = 1

    @override
    def compute(self) -> Tensor:
        self.samples_seen = int(self.samples)
        return self.total / self.samples


HALVES = (torch.bfloat16, torch.float16)


def keep_sums_precise(module: nn.Module) -> None:
    """Give metrics sums of at least 32 bits where ``trainer.precision=bf16-true`` took them away.

    In bfloat16 a sum of 256 ones stays there, whatever is added.
    """
    for metric in module.modules():
        if isinstance(metric, Metric):
            precise = SUMS if isinstance(metric, EpochMean) else torch.float32
            metric._apply(
                lambda state, to=precise: state.to(to) if state.dtype in HALVES else state
            )
