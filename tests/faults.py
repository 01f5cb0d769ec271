"""Callbacks that make one rank misbehave."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import Dataset

from lockstep.callbacks.guards import PeerCheck
from lockstep.data import Splits
from lockstep.module import SupervisedModule


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
            if self.how == "SIGKILL_HOST":
                host = multiprocessing.parent_process()
                assert host is not None
                assert host.pid is not None
                os.kill(host.pid, signal.SIGKILL)
                time.sleep(60)
            if self.how == "scancel":  # SLURM's notice, to every task of the step
                subprocess.check_call(["scancel", "--signal=USR1", os.environ["SLURM_JOB_ID"]])
                time.sleep(2)
                return
            os.kill(os.getpid(), getattr(signal, self.how))


def break_at(epoch: int, batch: int, how: str = "raise", rank: int = 0) -> str:
    """The override that adds `BreakOnce` to a run: once in the run's directory, resumed or not."""
    return (
        "+callbacks.break={_target_: faults.BreakOnce, directory: '${hydra:runtime.output_dir}', "
        f"how: {how}, epoch: {epoch}, batch: {batch}, rank: {rank}}}"
    )


class FaultyModule(SupervisedModule):
    """One rank breaks in ``phase``; the others are busy there for longer than a person waits."""

    def __init__(self, phase: str, rank: int, **parts: Any) -> None:
        super().__init__(**parts)
        self.phase, self.rank = phase, rank

    def setup(self, stage: str) -> None:
        self._at("setup")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._at("step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._at("validation")
        super().validation_step(batch, batch_idx)

    def _at(self, phase: str) -> None:
        if phase == self.phase:
            Path("fault").touch()
            if self.global_rank == self.rank:
                time.sleep(0.5)  # the others have begun
                raise RuntimeError(f"broken in {phase}")
            time.sleep(20)


class FaultyData(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sample ``bad`` cannot be read; reading any other takes the rank ``seconds``."""

    def __init__(self, samples: int, bad: int) -> None:
        self.samples, self.bad = samples, bad

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.bad:
            raise ValueError(f"sample {index} cannot be read")
        return torch.zeros(10), torch.zeros(1)


def faulty_data(samples: int, bad: int) -> Splits:
    return Splits(FaultyData(samples, bad))


class FullDisk(Callback):
    """From the end of an epoch on, no file can grow beyond ``limit`` bytes."""

    def __init__(self, after_epoch: int, limit: int) -> None:
        self.after_epoch, self.limit = after_epoch, limit

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == self.after_epoch:
            import resource

            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.limit))
