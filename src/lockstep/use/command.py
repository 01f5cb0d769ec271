"""The commands that start from a checkpoint: its run's own config, with this command's overrides.

Nothing here imports torch, so a wrong name is answered at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf

from lockstep import cli
from lockstep.config import Config, as_config, register
from lockstep.errors import UsageError
from lockstep.placement import place
from lockstep.prepare import prepare as prepare_run
from lockstep.record import Run, Task
from lockstep.resume import SPANNING, config_of, damage, newest_checkpoint

TRAINING_ONLY: dict[str, Any] = {
    "callbacks": {},
    "compare": False,
    "find": None,
    "init_from": None,
    "launch.max_restarts": 0,
    "logger": {},
    "objective": None,
    "predict": False,
    "resume": None,
    "strategy.options": {},
    "sweep.resume": None,
    "trainer.accumulate_grad_batches": 1,
    "trainer.enable_checkpointing": False,
    "trainer.fast_dev_run": False,
    "trainer.limit_predict_batches": None,
    "trainer.limit_test_batches": None,
    "trainer.overfit_batches": 0.0,
    "trainer.profiler": None,
}
"""What a trained run's config loses: it says how to train, or would leave out samples."""

ON_ONE_CPU: dict[str, Any] = {
    "compile": False,
    "trainer.accelerator": "cpu",
    "trainer.devices": 1,
    "trainer.limit_predict_batches": 1,
    "trainer.num_nodes": 1,
    "trainer.precision": "32-true",
    "trainer.strategy": "auto",
    "trainer.sync_batchnorm": False,
}
"""What a config gets for a command that looks at the network, not at the data."""


@dataclass
class UseConfig(Config):
    """A run's config, and what is asked of its model."""

    checkpoint: str = MISSING
    """A checkpoint file, or the directory of a run: its best one, or its newest."""
    output: str | None = None
    """The file to write; its suffix says the format. None: in this command's own directory."""


@dataclass(frozen=True)
class Request:
    """What a task is made from."""

    checkpoint: Path
    output: Path | None
    directory: Path


MakeTask = Callable[[Request], Task]


def use(composed: DictConfig, make_task: MakeTask) -> None:
    """Do the task with the run's model, where the config says."""
    cli.run(composed, lambda config: prepare(config, make_task))


def prepare(composed: DictConfig, make_task: MakeTask) -> Run:
    """Check what is asked for and decide where it is computed; raises `UsageError`."""
    plain = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(plain, dict)
    checkpoint, output = plain.pop("checkpoint"), plain.pop("output")
    directory = Path(HydraConfig.get().runtime.output_dir).resolve()
    request = Request(
        Path(checkpoint).resolve(), Path(output).resolve() if output else None, directory
    )
    task = make_task(request)
    config = OmegaConf.create(plain)
    _let_batches_divide(config)
    return replace(prepare_run(config), task=task)


def _let_batches_divide(config: DictConfig) -> None:
    """Round the batch up to the number of processes: in use, its size changes no result."""
    sweeping = HydraConfig.get().mode == RunMode.MULTIRUN
    world_size = place(as_config(config), sweeping).world_size
    size = config.data.eval_batch_size or config.data.global_batch_size
    config.data.global_batch_size = -(-size // world_size) * world_size


def offer_base(command: str, conf: Path, where: Mapping[str, Any] | None = None) -> None:
    """Make known to Hydra, as ``trained``, the config of the run that ``checkpoint=`` names.

    A folder of ``conf/`` that an override names (``data=digits``) takes the place of what the run
    has there. ``where`` is what else the command changes. Raises `UsageError` for a checkpoint that
    is not there, is torn, or has no config.
    """
    register()
    overrides = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    source = _source(command, overrides)
    stored = OmegaConf.load(config_of(source))
    assert isinstance(stored, DictConfig)
    del stored["defaults"]
    for key, value in (TRAINING_ONLY | dict(where or {})).items():
        OmegaConf.update(stored, key, value, merge=False)
    chosen = [
        name for name in _folders(conf) if any(item.startswith(f"{name}=") for item in overrides)
    ]
    for name in chosen:
        stored.pop(name)
    if "strategy" in chosen:
        stored.trainer.strategy = "${strategy.name}"
    defaults = ["use_schema", "_self_", *({name: None} for name in chosen), {"hydra": "default"}]
    store = ConfigStore.instance()
    store.store(name="use_schema", node=UseConfig)
    node = OmegaConf.to_container(stored, resolve=False)
    assert isinstance(node, dict)
    store.store(name="trained", node={"defaults": defaults, **node})


def _folders(conf: Path) -> list[str]:
    no_parts = SPANNING | {"find", "hydra"}
    return sorted(
        path.name for path in conf.iterdir() if path.is_dir() and path.name not in no_parts
    )


def _source(command: str, overrides: list[str]) -> Path:
    parser = OverridesParser.create()
    given = [parser.parse_override(item) for item in overrides if item.startswith("checkpoint=")]
    if not given:
        raise UsageError(
            f"checkpoint must name a checkpoint or the directory of a run; there is none. "
            f"Use: python {command}.py checkpoint=outputs/<date>/<run>"
        )
    source = Path(str(given[-1].value()))
    if source.is_file():
        problem = damage(source)
        if problem is not None:
            raise UsageError(
                f"{source} must be a whole checkpoint; it is damaged ({problem}). Name another "
                "one, or the run's directory, whose newest good one is taken."
            )
    elif not source.is_dir() or newest_checkpoint(source) is None:
        raise UsageError(
            f"checkpoint must name a checkpoint or the directory of a run that has one; {source} "
            f"{'has none that is whole' if source.is_dir() else 'is not there'}. "
            "Look for checkpoints/*.ckpt in outputs/."
        )
    return source
