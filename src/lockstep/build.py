"""Config -> objects. The only file that turns a ``_target_`` into something that runs."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy

from lockstep.callbacks.bar import Bar
from lockstep.checkpoints import AtomicCheckpoints, keep_names_plain
from lockstep.config import Config, Target, TrainerConfig
from lockstep.data import DataModule, Splits
from lockstep.errors import UsageError
from lockstep.placement import Placement
from lockstep.sizes import batch_sizes, effective_batch, scaled_optimizer
from lockstep.strategies.data_parallel import DataParallelStrategy
from lockstep.strategies.exact_ddp import ExactDDPStrategy
from lockstep.strategies.spawned import SpawnedEnvironment, start_method

AMOUNT = "It must be a whole number of batches, or a share of them from 0.0 to 1.0."
RULES = {
    "limit_train_batches": AMOUNT,
    "limit_val_batches": AMOUNT,
    "limit_test_batches": AMOUNT,
    "limit_predict_batches": AMOUNT,
    "overfit_batches": AMOUNT,
    "fast_dev_run": "It must be true, false or a number of batches.",
    "max_time": "It must be DD:HH:MM:SS, or a mapping such as {hours: 1, minutes: 30}.",
}
"""Where Lightning's own message does not tell what an argument may be."""


@dataclass
class Built:
    """What `lockstep.run` needs: all of it picklable when every part of it is."""

    trainer: Trainer
    module: LightningModule
    data: LightningDataModule
    floor: float | None
    """The lowest possible test loss, where the data set knows it."""


def build(
    config: Config, placement: Placement, directory: Path, callbacks: list[Callback]
) -> Built:
    """Build the objects of one run. ``callbacks`` come before those of the config."""
    data, floor = build_data(config, placement)
    module = build_module(config)
    trainer = build_trainer(config, placement, directory, callbacks)
    return Built(trainer, module, data, floor)


def make(target: Target, **extra: Any) -> Any:
    """Call what ``_target_`` names. Containers arrive as plain dicts and lists: an omegaconf object
    in a module's hyper-parameters would make its checkpoints unreadable with ``weights_only``."""
    try:
        return instantiate(target, **extra, _convert_="all")
    except InstantiationException as error:
        # Hydra wraps what a target raises; a person's own mistake is told without that.
        if isinstance(error.__cause__, UsageError):
            raise error.__cause__ from None
        if str(error).startswith("Error locating target"):
            raise UsageError(f"{error}. Is the name right, and its package installed?") from None
        raise


def build_data(config: Config, placement: Placement) -> tuple[LightningDataModule, float | None]:
    made = make(config.data.datasets)
    if isinstance(made, LightningDataModule):
        return made, None
    if not isinstance(made, Splits):
        raise UsageError(
            "data.datasets must yield lockstep.data.Splits or a LightningDataModule; "
            f"{config.data.datasets.get('_target_')} returned {type(made).__name__}."
        )
    sizes = batch_sizes(config.data, placement.world_size)
    assert config.seed is not None
    return DataModule(made, config.data, sizes, config.seed), made.floor


def build_module(config: Config) -> LightningModule:
    """A module gets ``optimizer`` and ``scheduler`` when its constructor takes them."""
    factory = make({**config.model, "_partial_": True})
    optimizer = scaled_optimizer(config.optimizer, effective_batch(config))
    offered = {
        "optimizer": make(optimizer) if optimizer else None,
        "scheduler": make(config.scheduler) if config.scheduler else None,
    }
    taken = inspect.signature(factory.func).parameters
    takes_all = any(item.kind is item.VAR_KEYWORD for item in taken.values())
    module = factory(**{k: value for k, value in offered.items() if takes_all or k in taken})
    if not isinstance(module, LightningModule):
        raise UsageError(
            "model._target_ must be a LightningModule, such as lockstep.module.SupervisedModule "
            f"around your network; {config.model.get('_target_')} is a {type(module).__name__}."
        )
    keep_names_plain(module)
    return module


def build_trainer(
    config: Config, placement: Placement, directory: Path, callbacks: list[Callback]
) -> Trainer:
    arguments = {item.name: getattr(config.trainer, item.name) for item in fields(TrainerConfig)}
    arguments |= {
        "accelerator": placement.accelerator,
        "devices": placement.devices,
        "strategy": build_strategy(config, placement),
        "callbacks": [*callbacks, *_each(config.callbacks)],
        "logger": _each(config.logger) or False,
        "default_root_dir": config.trainer.default_root_dir or directory,
    }
    shown = config.trainer.enable_progress_bar
    if sys.stdout.isatty() if shown is None else shown:
        arguments["callbacks"].append(Bar())
    arguments["enable_progress_bar"] = False  # of Lightning
    if isinstance(config.trainer.profiler, dict):
        arguments["profiler"] = make(config.trainer.profiler)
    plugins = [make(plugin) for plugin in config.trainer.plugins or []]
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(AtomicCheckpoints())
    arguments["plugins"] = plugins
    try:
        return Trainer(**arguments)
    except (MisconfigurationException, ValueError, TypeError, AttributeError) as error:
        refused = _refused_arguments(config.trainer, error)
        if not refused:
            raise
        rules = [RULES[name] for name in refused if name in RULES]
        values = " ".join(f"trainer.{name}={getattr(config.trainer, name)}" for name in refused)
        raise UsageError(
            f"{values} is refused by Lightning: {' '.join([*rules, str(error)])}"
        ) from error


def _refused_arguments(trainer: TrainerConfig, error: Exception) -> list[str]:
    """Those that the message names; else those that are refused on their own, too."""
    default = TrainerConfig()
    mine = {
        item.name: getattr(trainer, item.name)
        for item in fields(TrainerConfig)
        if getattr(trainer, item.name) != getattr(default, item.name)
    }
    named = [name for name in mine if re.search(rf"\b{name}\b", str(error))]
    return named or [name for name, value in mine.items() if _is_refused(name, value, error)]


def _is_refused(name: str, value: Any, error: Exception) -> bool:
    if name in ("accelerator", "strategy", "devices", "plugins"):
        return False
    alone = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    try:
        Trainer(**{**alone, name: value})
    except type(error):
        return True
    return False


def build_strategy(config: Config, placement: Placement) -> Strategy | str:
    """An instance where the strategy has options, else its name."""
    name, options = placement.strategy, dict(config.strategy.options)
    if name in ("auto", "dp"):
        if options:
            raise UsageError(
                f"trainer.strategy={name} takes no options; got strategy.options={options}. "
                f"Use strategy={name}, which clears them."
            )
        return DataParallelStrategy() if name == "dp" else "auto"
    if name.endswith("find_unused_parameters_true"):
        options["find_unused_parameters"] = True
    if name.startswith("ddp_spawn"):
        options |= {"start_method": start_method(), "cluster_environment": SpawnedEnvironment()}
    return ExactDDPStrategy(timeout=timedelta(seconds=config.strategy.timeout_s), **options)


def _each(targets: dict[str, Any]) -> list[Any]:
    return [make(target) for target in targets.values() if target]
