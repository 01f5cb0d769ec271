"""Config -> objects. The only file that turns a ``_target_`` into something that runs."""

from __future__ import annotations

import inspect
import logging
import sys
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy

from lockstep.callbacks.bar import Bar
from lockstep.checkpoints import AtomicCheckpoints, keep_names_plain
from lockstep.config import Config, Target, TrainerConfig
from lockstep.data import DataModule, Splits
from lockstep.errors import UsageError, as_not_located
from lockstep.exchange.chosen import strategy_class
from lockstep.loggers.guarded import guarded
from lockstep.placement import MODEL_PARALLEL, Placement
from lockstep.processes import start_method
from lockstep.record import Run
from lockstep.refusals import refusals_named
from lockstep.slurm.environment import cluster_environment
from lockstep.strategies.data_parallel import DataParallelStrategy
from lockstep.strategies.spawned import SpawnedEnvironment
from lockstep.trust import check_objects

log = logging.getLogger(__name__)


@dataclass
class Built:
    """What `lockstep.run` needs: all of it picklable when every part of it is."""

    trainer: Trainer
    module: LightningModule
    data: LightningDataModule
    floor: float | None
    """The lowest possible test loss, where the data set knows it."""


def build(run: Run, callbacks: list[Callback]) -> Built:
    """Build the objects of one run. ``callbacks`` come before those of the config."""
    data, floor = build_data(run)
    module = build_module(run)
    trainer = build_trainer(run, callbacks)
    refuse_missing_monitor(run.config, data)
    return Built(trainer, module, data, floor)


def refuse_missing_monitor(config: Config, data: LightningDataModule) -> None:
    """Without validation data there is nothing for a callback to watch."""
    if (
        not isinstance(data, DataModule)
        or data.splits.val is not None
        or config.trainer.fast_dev_run
    ):
        return
    for name, target in config.callbacks.items():
        monitor = (target or {}).get("monitor") or ""
        if monitor.startswith("val/"):
            raise UsageError(
                f"callbacks.{name} monitors {monitor}, and the data has no validation split. Use "
                f"callbacks=unmonitored, or callbacks.{name}.monitor=null; or return one in "
                "Splits(...)."
            )


def make(target: Target, **extra: Any) -> Any:
    """Call what ``_target_`` names. Containers arrive as plain dicts and lists: an omegaconf object
    in a module's hyper-parameters would make its checkpoints unreadable with ``weights_only``."""
    check_objects(target)
    try:
        return instantiate(target, **extra, _convert_="all")
    except InstantiationException as error:
        # Hydra wraps what a target raises; a person's own mistake is told without that.
        if isinstance(error.__cause__, UsageError):
            raise error.__cause__ from None
        if str(error).startswith("Error locating target"):
            raise as_not_located(error, str(target["_target_"])) from None
        raise


def build_data(run: Run) -> tuple[LightningDataModule, float | None]:
    config = run.config
    made = make(config.data.datasets)
    if isinstance(made, LightningDataModule):
        log.info("%s makes its own batches: the sizes above are not used", type(made).__name__)
        return made, None
    if not isinstance(made, Splits):
        raise UsageError(
            "data.datasets must yield lockstep.data.Splits or a LightningDataModule; "
            f"{config.data.datasets.get('_target_')} returned {type(made).__name__}."
        )
    assert config.seed is not None
    return DataModule(made, config.data, run.sizes, config.seed), made.floor


def build_module(run: Run) -> LightningModule:
    """A module gets ``optimizer`` and ``scheduler`` when its constructor takes them."""
    config = run.config
    factory = make({**config.model, "_partial_": True})
    offered = {
        "optimizer": make(run.optimizer) if run.optimizer else None,
        "scheduler": make(config.scheduler) if config.scheduler else None,
    }
    taken = inspect.signature(factory.func).parameters
    takes_all = any(item.kind is item.VAR_KEYWORD for item in taken.values())
    module = factory(**{k: value for k, value in offered.items() if takes_all or k in taken})
    if not isinstance(module, LightningModule):
        raise UsageError(
            "model._target_ must be a LightningModule, such as "
            "lockstep.module.SupervisedModule "
            f"around your network; {config.model.get('_target_')} is a {type(module).__name__}."
        )
    if run.optimizer and not takes_all and "optimizer" not in taken:
        log.info("%s makes its own optimizer: optimizer.* is not used", type(module).__name__)
    keep_names_plain(module)
    return module


def build_trainer(run: Run, callbacks: list[Callback]) -> Trainer:
    config, placement = run.config, run.placement
    arguments = {item.name: getattr(config.trainer, item.name) for item in fields(TrainerConfig)}
    arguments |= {
        "accelerator": placement.accelerator,
        "devices": placement.devices,
        "strategy": build_strategy(config, placement),
        "callbacks": [*callbacks, *_each(config.callbacks)],
        "logger": guarded(_each(config.logger)) or False,
        "default_root_dir": config.trainer.default_root_dir or run.directory,
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
    if not any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        plugins += cluster_environment(placement)
    arguments["plugins"] = plugins
    with refusals_named(config.trainer):
        return Trainer(**arguments)


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
    if name in MODEL_PARALLEL:
        from lockstep.modelparallel.chosen import model_parallel

        return model_parallel(config, placement)
    if name.endswith("find_unused_parameters_true"):
        options["find_unused_parameters"] = True
    if name.startswith("ddp_spawn"):
        options |= {"start_method": start_method(), "cluster_environment": SpawnedEnvironment()}
    timeout = timedelta(seconds=config.strategy.timeout_s)
    return strategy_class(name, config.strategy.options)(timeout=timeout, **options)


def _each(targets: dict[str, Any]) -> list[Any]:
    return [make(target) for target in targets.values() if target]
