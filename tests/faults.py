"""Callbacks that make one rank misbehave."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed
from lightning.pytorch import Callback, LightningModule, Trainer

from lockstep.callbacks.guards import PeerCheck


class StallRank0(Callback):
    """Rank 0 stops answering after its second step."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_rank == 0 and batch_idx == 2:
            time.sleep(60)


class ChangeDigestOnRank1(Callback):
    """Rank 1 behaves as if it had been started with another config."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        guard = next(item for item in trainer.callbacks if isinstance(item, PeerCheck))
        if trainer.global_rank == 1:
            guard._digest = "another"
        guard.setup(trainer, pl_module, stage)


class RequireNccl(Callback):
    """Fails unless this rank's process group is NCCL's."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        backend = torch.distributed.get_backend()
        assert backend == "nccl", backend
