"""What checkpoints hold beside weights and counters, so that a resumed run is the same run."""

from __future__ import annotations

import logging
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lockstep.checkpoints import end_epoch_when_resumed
from lockstep.data.loader import training_position
from lockstep.data.sharding import share_of_data
from lockstep.epoch_mean import EpochMean
from lockstep.group import gather
from lockstep.loggers.csv import CsvLogger
from lockstep.loggers.mlflow import MlflowLogger
from lockstep.randomness import random_state, seed_everything, set_random_state

log = logging.getLogger(__name__)

KEY = "lockstep"


class ResumeState(Callback):
    """Save the generators of all ranks and the sums of an unfinished epoch; put them back.

    With another number of ranks, or after a step that broke, there are no generators to put back:
    each rank then draws from (seed, rank, step). Nor are there sums after a step that broke: the
    epoch's train/loss then is the mean over the batches after resuming.
    """

    def __init__(self, seed: int, resumed: bool) -> None:
        self._seed, self._resumed = seed, resumed
        self._saved: dict[str, Any] | None = None

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, CsvLogger):
                logger.flush()  # a checkpoint must not be newer than the history
        checkpoint[KEY] = {"generators": None, "epoch_sums": None}
        if trainer.interrupted:
            return  # rank zero is alone, and in the middle of a step
        end_epoch_when_resumed(trainer, checkpoint)
        # Ranks that compute the same samples have the same sums, which count once.
        sums = epoch_sums(pl_module) if share_of_data(trainer).leads else None
        ranks = gather((random_state(), sums))
        checkpoint[KEY]["generators"] = [state for state, _ in ranks]
        if not training_position(trainer).is_over:
            every = [sums for _, sums in ranks if sums is not None]
            checkpoint[KEY]["epoch_sums"] = {
                name: torch.stack([sums[name] for sums in every]).sum(0) for name in every[0]
            }

    @override
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._saved = checkpoint.get(KEY)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step, saved = trainer.global_step, self._saved
        if self._resumed and trainer.is_global_zero:
            for logger in trainer.loggers:
                if isinstance(logger, CsvLogger | MlflowLogger):
                    logger.rewind(step)
        if saved is None:
            return
        if trainer.is_global_zero:
            epoch, batches, _ = training_position(trainer)
            log.info("resumed in epoch %d, batch %d, step %d", epoch + 1, batches, step)
        share = share_of_data(trainer)
        restore_sums(pl_module, saved["epoch_sums"] or {}, share.rank == 0)
        generators = saved["generators"] or []
        if len(generators) == trainer.world_size:
            set_random_state(generators[trainer.global_rank])
        else:
            seed_everything(hash((self._seed, share.rank, step)) % 2**63)


def epoch_sums(module: LightningModule) -> dict[str, Tensor]:
    """This rank's sums of each `EpochMean`: total and samples, shape (2,)."""
    return {
        name: torch.stack([mean.total.cpu(), mean.samples.cpu().to(mean.total.dtype)])
        for name, mean in module.named_modules()
        if isinstance(mean, EpochMean)
    }


def restore_sums(module: LightningModule, sums: dict[str, Tensor], carries: bool) -> None:
    """One rank carries on the sums of all; the others begin with nothing."""
    for name, mean in module.named_modules():
        if isinstance(mean, EpochMean) and name in sums and sums[name][1]:
            total, samples = sums[name].tolist() if carries else (0.0, 0)
            mean.resume(total, int(samples))
