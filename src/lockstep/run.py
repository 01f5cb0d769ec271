"""One run in one process: build, fit, test, and say in plain numbers what happened.

`lockstep.launch` decides in which processes this happens.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lockstep.build import Built, build
from lockstep.callbacks.exchange import ExchangeCost
from lockstep.callbacks.guards import FiniteLoss, PeerCheck, PreciseSums, RankSeeds
from lockstep.callbacks.prune import PruneTrial, pruning
from lockstep.callbacks.resume_state import ResumeState
from lockstep.callbacks.step_clock import StepClock
from lockstep.callbacks.stop_together import StopTogether
from lockstep.data import DataModule
from lockstep.devices import cores
from lockstep.errors import UsageError
from lockstep.group import leave_group
from lockstep.outcome import (
    best_checkpoint,
    callbacks_of,
    describe_training,
    plain_metrics,
    samples_seen,
)
from lockstep.overhead import trim
from lockstep.placement import STRATEGIES
from lockstep.predictions import write_predictions
from lockstep.randomness import seed_everything
from lockstep.record import Run
from lockstep.results import has_objective
from lockstep.signals import stop
from lockstep.trained import load_module


def quiet_lightning() -> None:
    """Lightning's remarks on devices and products are not this run's phases; warnings stay."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
    # Lightning 2.6 with torch 2.14; nothing a user can do.
    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
    # Epoch values are logged whatever the interval of step values is.
    warnings.filterwarnings("ignore", "The number of training batches .* logging interval")
    # Lightning says it wherever SLURM is; `lockstep.placement` refuses where it matters.
    warnings.filterwarnings("ignore", "The `srun` command is available on your system but is not")
    # It holds the run that goes on: another run's directory is refused before.
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")


def build_here(run: Run) -> Built:
    """Seed this process and build the run's objects; the same weights on every rank."""
    seed = run.config.seed
    assert seed is not None, "a seed is drawn before the launch"
    quiet_lightning()
    seed_everything(seed)
    guards = [
        StopTogether(run.directory),
        PeerCheck(run.config, run.placement),
        RankSeeds(seed),
        ResumeState(seed, run.resumed),
        FiniteLoss(),
        PreciseSums(),
        StepClock(),
    ]
    if run.config.compare:
        guards.append(ExchangeCost())
    if run.config.plots:
        from lockstep.pictures.callback import Pictures

        guards.append(Pictures(run.directory))
    built = build(run, [*guards, *pruning(run)])
    trim(built.trainer, built.module)
    if run.config.init_from is not None and run.checkpoint is None:
        load_module(built.module, Path(run.config.init_from))
    return built


def compute(built: Built, run: Run) -> dict[str, Any]:
    """What the run is for, with one Trainer and one process group: training, or its own task.

    Returns plain numbers and words, the same on every rank, for ``result.json``.
    """
    exit_code = 1
    quiet_lightning()
    set_threads(run)
    if run.config.compile:
        compile_network(built.module, run.config.compile)
    log_config(built.trainer, run)
    try:
        outcome = fit_and_test(built, run) if run.task is None else run.task(built, run)
        outcome["samples_seen"] = samples_seen(built.module)
        exit_code = 0 if has_objective(run.config.objective, outcome["metrics"]) else 1
    except BaseException:
        stop.leaving = True
        raise
    finally:
        finish_wandb(exit_code)
    leave_group()
    return outcome


def fit_and_test(built: Built, run: Run) -> dict[str, Any]:
    """From the first step to the last metric."""
    trainer = built.trainer
    only_plain = None if run.checkpoint is None else True
    trainer.fit(
        built.module, datamodule=built.data, ckpt_path=run.checkpoint, weights_only=only_plain
    )
    stop.leave_if_asked()
    outcome = describe_training(built, run)
    if any(isinstance(item, PruneTrial) and item.pruned for item in callbacks_of(trainer)):
        outcome["status"] = "pruned"
    elif run.config.test and has_test(built.module, built.data):
        best = best_checkpoint(trainer)
        trainer.test(
            built.module,
            datamodule=built.data,
            ckpt_path=best,
            weights_only=best is not None or None,
            verbose=False,
        )
        outcome["metrics"] |= plain_metrics(built)
    if run.config.predict:
        outcome["predictions"] = predict(built, run)
    return outcome


def compile_network(module: LightningModule, options: Any) -> None:
    """Compile ``module.network`` in place: its parameters keep their names.

    In each process of its own: pickling a module, as ``ddp_spawn`` does, drops what was compiled.
    """
    network = getattr(module, "network", None)
    if not isinstance(network, nn.Module) or not isinstance(options, bool | dict):
        raise UsageError(
            "compile must be true or a mapping, for a module with a `network`; got "
            f"compile={options!r} and {type(module).__name__}.network: {type(network).__name__}. "
            "Use compile=false, and self.<part>.compile() in the module's constructor."
        )
    network.compile(**({} if isinstance(options, bool) else options))


def predict(built: Built, run: Run) -> str:
    """Write ``predictions.pt`` with the weights that were tested; returns its path."""
    if not isinstance(built.data, DataModule) or not built.data.predict_samples:
        raise UsageError(
            "predict=true needs a test or predict split from data.datasets; there is none. "
            "Return one in Splits(...), or use predict=false."
        )
    best = best_checkpoint(built.trainer)
    return str(write_predictions(built.trainer, built.module, built.data, best, run.directory))


def has_test(module: LightningModule, data: LightningDataModule) -> bool:
    if isinstance(data, DataModule):
        return data.splits.test is not None and is_overridden("test_step", module)
    return is_overridden("test_dataloader", data) and is_overridden("test_step", module)


def log_config(trainer: Trainer, run: Run) -> None:
    """Give every logger the config as plain values, once, from rank zero."""
    config = asdict(run.config)
    # A resumed run goes on with its wandb run: the directory's name is what both share.
    os.environ.setdefault("WANDB_RUN_ID", "-".join(run.directory.resolve().parts[-3:])[-64:])
    for logger in trainer.loggers:
        logger.log_hyperparams(config)


def set_threads(run: Run) -> None:
    """Share the cores out over the processes of this machine, unless OMP_NUM_THREADS is set."""
    processes = min(run.placement.world_size, run.placement.device_count)
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    alone = STRATEGIES[run.placement.strategy] == "one"
    shared = torch.get_num_threads() if alone else cores() // processes
    threads = run.config.launch.threads or (int(given) if given.isdigit() else max(1, shared))
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # else Lightning's launcher sets both, its own way


def finish_wandb(exit_code: int) -> None:
    """Close this process's wandb run with the job's own exit code, and end its service."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish(exit_code=exit_code)
        wandb.teardown()
