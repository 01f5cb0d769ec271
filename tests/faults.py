"""Callbacks that make one rank misbehave."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
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


class BreakOnce(Callback):
    """Breaks at one step of one rank, the first time that the run comes there."""

    def __init__(self, directory: str, how: str, epoch: int, batch: int, rank: int = 0) -> None:
        self.marker = Path(directory) / "broke"
        self.how, self.place, self.rank = how, (epoch, batch), rank

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        place = trainer.current_epoch, progress.ready - 1
        if place == self.place and trainer.global_rank == self.rank and not self.marker.exists():
            self.marker.touch()
            if self.how == "raise":
                raise RuntimeError("broken on purpose")
            os.kill(os.getpid(), getattr(signal, self.how))
