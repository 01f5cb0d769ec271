"""From a composed config to a run that can be launched: what to run, where, and from what."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lockstep.config import Config, as_config
from lockstep.errors import UsageError
from lockstep.hosts.agreement import agreed, restarted
from lockstep.hosts.meeting import from_rank_zero
from lockstep.placement import MODEL_PARALLEL, place
from lockstep.precision import check_precision
from lockstep.record import Run, Task
from lockstep.resume import newest_checkpoint, resumed_config
from lockstep.rundir import config_digest, config_file
from lockstep.secrets import refuse_secrets, without_secrets
from lockstep.sizes import batch_sizes, scaled_optimizer
from lockstep.slurm.requeue import was_requeued
from lockstep.trust import check_config


def prepare(composed: DictConfig) -> Run:
    """Check a composed config and decide where it runs; raises `UsageError`."""
    hydra = HydraConfig.get()
    directory = Path(hydra.runtime.output_dir)
    config, resumed = _config_of(composed, hydra.mode, directory)
    check_config(asdict(config))
    refuse_secrets(asdict(config))
    task: Task | None = None
    if config.find is not None:
        from lockstep.find.request import finder

        config, task = finder(config, resumed)
    if config.seed is None:
        drawn = from_rank_zero("seed", lambda: str(random.SystemRandom().randrange(2**31)))
        config = replace(config, seed=int(drawn))
    _check_values(config)
    placement = place(config, hydra.mode == RunMode.MULTIRUN)
    check_precision(config, placement.accelerator)
    micro_steps = config.trainer.accumulate_grad_batches
    shares = placement.world_size
    if placement.strategy in MODEL_PARALLEL:
        from lockstep.modelparallel.mesh import mesh_of

        shares = mesh_of(config, placement).data
    sizes = batch_sizes(config.data, shares, micro_steps)
    checkpoint = newest_checkpoint(directory) if resumed else None
    run = Run(
        config,
        placement,
        sizes,
        scaled_optimizer(config.optimizer, sizes.effective),
        directory,
        overrides(),
        _plain_hydra(hydra),
        resumed=resumed,
        config_digest=config_digest(composed),
        checkpoint=checkpoint,
        task=task,
    )
    return agreed(run)


def _config_of(composed: DictConfig, mode: RunMode | None, directory: Path) -> tuple[Config, bool]:
    """The config to run, and whether it is that of a run to go on with."""
    goes_on = composed.sweep.resume is not None
    if goes_on and mode != RunMode.MULTIRUN:
        raise UsageError("sweep.resume goes on with a sweep: add -m and the sweep's overrides.")
    begun = (
        (goes_on and config_file(directory).exists())
        or restarted(directory)
        or (composed.resume is None and was_requeued(directory))
    )
    if not begun and composed.resume is None:
        config = as_config(composed)
        if config.init_from is not None and not Path(config.init_from).is_file():
            raise UsageError(f"init_from must name a checkpoint; there is no {config.init_from}.")
        return config, False
    if not begun and mode == RunMode.MULTIRUN:
        raise UsageError(
            f"resume goes on with one run; got resume={composed.resume} in a sweep. Leave out -m."
        )
    if not begun and composed.init_from is not None:
        raise UsageError("resume and init_from exclude each other: go on, or start anew.")
    return resumed_config(composed, overrides(), directory), True


def _check_values(config: Config) -> None:
    if config.seed is not None and config.seed < 0:
        raise UsageError(f"seed must be 0 or greater, or null to draw one; got {config.seed}.")
    for key, value in (
        ("trainer.accumulate_grad_batches", config.trainer.accumulate_grad_batches),
        ("strategy.timeout_s", config.strategy.timeout_s),
        ("launch.threads", config.launch.threads),
        ("launch.grace_s", config.launch.grace_s),
    ):
        if value is not None and value <= 0:
            raise UsageError(f"{key} must be greater than 0; got {value}.")
    if config.launch.max_restarts < 0:
        restarts = config.launch.max_restarts
        raise UsageError(f"launch.max_restarts must be 0 or greater; got {restarts}.")
    objective = config.objective
    names = objective if isinstance(objective, list) else [objective or ""]
    if not names or not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"objective must be the name of a metric, a list of names, or null; got {objective!r}."
        )


def overrides() -> list[str]:
    """Those of the command, as typed."""
    given = OmegaConf.to_container(HydraConfig.get().overrides.task)  # with its ${...}
    assert isinstance(given, list)
    return without_secrets(given)


def _plain_hydra(hydra: Any) -> dict[str, Any]:
    """Hydra's own config without interpolations, which mean nothing in another process."""
    unresolved = OmegaConf.to_container(hydra, resolve=False)
    assert isinstance(unresolved, dict)
    # These are resolved against the job's config, which is not there in another process.
    directory = Path(hydra.runtime.output_dir)
    unresolved["run"]["dir"] = str(directory)
    unresolved["sweep"] |= {"dir": str(directory.parent), "subdir": directory.name}
    resolved = OmegaConf.to_container(OmegaConf.create({"hydra": unresolved}), resolve=True)
    assert isinstance(resolved, dict)
    return dict(resolved["hydra"])
