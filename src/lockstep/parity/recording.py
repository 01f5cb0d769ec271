"""What one run did, written down so that another run can be compared with it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves
from torch.utils.data import DistributedSampler
from torchmetrics import Metric
from typing_extensions import override

from lockstep.data import train_split
from lockstep.data.sharding import TrainShards
from lockstep.group import gather

# Only a run's own processes import this file. Their warnings would stand between the table's lines.
logging.captureWarnings(True)

READS = 4
"""Times that one sample is read; a coin that is tossed each time is missed once in eight runs."""


class Recording(Callback):
    """Write ``recording.pt`` from rank zero: each step's loss, the last weights, and `traits`.

    The loss of a step is the mean over ranks of what ``backward`` starts from, because DDP averages
    gradients: this mean is the function that the run really descends. It equals the loss of one
    device exactly when the gradients do, whatever the ranks' shares and weights are.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._losses: list[float] = []
        self._drawn = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Reading samples may draw numbers; here it is before the ranks are seeded.
        if stage == "fit" and (train := train_split(trainer)) is not None:
            self._drawn = draws(train)

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        self._losses.append(float(loss.detach().double().mean()))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ranks = gather(self._losses)
        if trainer.is_global_zero:
            drawn = {"draws": "the data set"} if self._drawn else {}
            written = {
                "losses": torch.tensor(ranks, dtype=torch.float64).mean(dim=0),
                "weights": {name: part.detach() for name, part in pl_module.named_parameters()},
                "traits": drawn | traits(trainer, pl_module),
            }
            torch.save(written, Path(self.directory) / "recording.pt")


def draws(dataset: Any) -> bool:
    """A sample is another one when it is read again: what augmentation does."""
    first, *others = (tree_leaves(dataset[0]) for _ in range(READS))
    return any(not all(map(_equal, first, other)) for other in others)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return bool(numpy.array_equal(one, other))


def traits(trainer: Trainer, module: LightningModule) -> dict[str, str]:
    """Name -> where, of all that makes a result depend on the split (docs/guarantees.md)."""
    parts = [(name, part) for name, part in module.named_modules() if not isinstance(part, Metric)]
    found = {
        "sum": [name for name, part in parts if getattr(part, "reduction", None) == "sum"],
        "batchnorm": [name for name, part in parts if _per_split(part)],
        "dropout": [name for name, part in parts if _drops(part)],
        "rounding": [] if "64" in str(trainer.precision) else [str(trainer.precision)],
    }
    sampler = getattr(trainer.train_dataloader, "sampler", None)
    # Lightning puts its sampler in under ddp, on one device too.
    shared = trainer.world_size > 1 or isinstance(sampler, DistributedSampler)
    if shared and not isinstance(sampler, TrainShards):
        found["loader"] = [type(trainer.train_dataloader).__name__]
    return {trait: _short(names) for trait, names in found.items() if names}


def _per_split(part: nn.Module) -> bool:
    return isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm)


def _drops(part: nn.Module) -> bool:
    if isinstance(part, _DropoutNd):
        return part.p > 0
    return isinstance(part, nn.MultiheadAttention | nn.RNNBase) and part.dropout > 0


def _short(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
