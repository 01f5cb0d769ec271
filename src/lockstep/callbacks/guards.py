"""What every rank checks and sets before its first step."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from typing_extensions import override

from lockstep.config import Config
from lockstep.data.sharding import share_of_data
from lockstep.epoch_mean import keep_sums_precise
from lockstep.errors import UsageError
from lockstep.group import gather
from lockstep.placement import Placement
from lockstep.randomness import seed_everything


class PeerCheck(Callback):
    """Every rank has joined the same run: as many processes as planned, with one config.

    Raises RuntimeError on every rank otherwise. Leftover environment variables and shared ports can
    join ranks of different jobs in one group, which then trains on the wrong share of the data.
    """

    def __init__(self, config: Config, placement: Placement) -> None:
        self._world_size = placement.world_size
        text = json.dumps(asdict(config), sort_keys=True, default=str)
        self._digest = hashlib.sha256(text.encode()).hexdigest()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        digests = gather(self._digest)
        actual = len(digests)
        if actual != self._world_size or trainer.world_size != self._world_size:
            raise RuntimeError(
                f"{self._world_size} processes were planned, but {actual} joined the process group "
                f"(Lightning counts {trainer.world_size})."
            )
        strangers = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if strangers:
            raise UsageError(
                f"All ranks must have one config; those of ranks {strangers} differ from rank 0's. "
                "Start every rank with the same command, files and version of the code."
            )


class RankSeeds(Callback):
    """Dropout and augmentation draw differently on each rank, and the same in each run.

    Weights are built before, from the seed alone, so they are equal on all ranks.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seed_everything(self._seed + 1_000_003 * share_of_data(trainer).rank)


class PreciseSums(Callback):
    """What is summed over an epoch is not summed in 16 bits; see `keep_sums_precise`."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        keep_sums_precise(pl_module)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        keep_sums_precise(pl_module)


class FiniteLoss(Callback):
    """Stop at the step whose loss is NaN or infinite: the weights are still those before it.

    Raises `UsageError` on the rank that has it. The host looks at a GPU's loss when it has asked
    for the backward pass, which the GPU computes meanwhile: neither waits for the other.
    """

    def __init__(self) -> None:
        self._underway: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        if loss.is_cuda:
            copied = loss.detach().to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied[1].record()
            self._underway.append(copied)
        else:
            self._check(trainer, loss.item())

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        losses, self._underway = self._underway, []
        for loss, arrived in losses:
            arrived.synchronize()
            self._check(trainer, loss.item())

    def _check(self, trainer: Trainer, loss: float) -> None:
        if not math.isfinite(loss):
            raise UsageError(
                f"The training loss must be finite; got {loss} at step "
                f"{trainer.global_step} (epoch {trainer.current_epoch}) on rank "
                f"{trainer.global_rank}. Try a smaller optimizer.lr or "
                "trainer.gradient_clip_val=1, and look for NaN in the data; "
                "trainer.detect_anomaly=true names the operation."
            )
