"""What a run says of itself in ``result.json``, in plain numbers, the same on every rank."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.build import Built
from lockstep.callbacks.exchange import ExchangeCost
from lockstep.callbacks.step_clock import StepClock
from lockstep.data.sharding import TrainShards, share_of_data
from lockstep.epoch_mean import EpochMean
from lockstep.group import gather
from lockstep.record import Run
from lockstep.traffic import gradient_bytes


def describe_training(built: Built, run: Run) -> dict[str, Any]:
    """What is known after training; testing resets these counters."""
    trainer = built.trainer
    callbacks = callbacks_of(trainer)
    clock = next(item for item in callbacks if isinstance(item, StepClock))
    exchange = (
        item.measured(clock.step_s()) for item in callbacks if isinstance(item, ExchangeCost)
    )
    sizes = batch_sizes_used(built, run)
    return {
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "metrics": plain_metrics(built),
        "best": describe_best(trainer, run.directory),
        "floor": built.floor,
        **sizes,
        **clock.measured(run.started, sizes["global_batch_size"]),
        **next(exchange, {}),
        "gradient_bytes": gradient_bytes(built.module),
        "parameter_bytes": gather(parameter_bytes(built.module)),
        "peak_memory_bytes": gather(peak_memory_bytes()),
        "pids": gather(os.getpid()),
        "threads_per_process": torch.get_num_threads(),
        "versions": {"torch": str(torch.__version__), "lightning": version("lightning")},
    }


def batch_sizes_used(built: Built, run: Run) -> dict[str, int]:
    """What the loader really yields: less than the config says where the data set is smaller, and
    whatever it is for a loader of a user's own."""
    loader, world_size = built.trainer.train_dataloader, share_of_data(built.trainer).world_size
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, TrainShards):
        size = sampler.global_batch_size
        return {"global_batch_size": size, "per_process_batch_size": -(-size // world_size)}
    own = getattr(loader, "batch_size", None) or run.config.data.global_batch_size // world_size
    return {"global_batch_size": own * world_size, "per_process_batch_size": own}


def callbacks_of(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set elsewhere
    return callbacks


def plain_metrics(built: Built) -> dict[str, float | list[Any]]:
    """The last value of everything logged, and the module's tables, as plain numbers."""
    logged = {name: value.item() for name, value in built.trainer.callback_metrics.items()}
    return dict(sorted((logged | getattr(built.module, "tables", {})).items()))


def best_checkpoint(trainer: Trainer) -> str | None:
    """The best checkpoint where a metric is monitored; None: the weights as they are."""
    callback = trainer.checkpoint_callback
    path = getattr(callback, "best_model_path", "")
    return path if path and getattr(callback, "monitor", None) else None


def describe_best(trainer: Trainer, directory: Path) -> dict[str, Any] | None:
    """The best checkpoint: what it was chosen by, and its path, in a run's directory from there.

    None where no metric is monitored, or nothing was validated.
    """
    path, callback = best_checkpoint(trainer), trainer.checkpoint_callback
    if path is None or not isinstance(callback, ModelCheckpoint):
        return None
    score, place, run = callback.best_model_score, Path(path).resolve(), directory.resolve()
    if score is None:
        return None
    return {
        "metric": callback.monitor,
        "mode": callback.mode,
        "value": score.item(),
        "checkpoint": (place.relative_to(run) if run in place.parents else place).as_posix(),
    }


def samples_seen(module: LightningModule) -> dict[str, int]:
    """Samples counted in the last epoch of each stage, over all ranks."""
    return {
        name.rpartition(".")[2].removesuffix("_loss"): mean.samples_seen
        for name, mean in module.named_modules()
        if isinstance(mean, EpochMean) and mean.samples_seen
    }


def parameter_bytes(module: nn.Module) -> int:
    """Of the parameters that this rank holds: all of them, unless the network is split."""
    held = (item.to_local() if isinstance(item, DTensor) else item for item in module.parameters())
    return sum(item.nbytes for item in held if not item.is_meta)


def peak_memory_bytes() -> int:
    """Of the GPU where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        return 0  # no getrusage there
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
