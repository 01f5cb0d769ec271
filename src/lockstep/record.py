"""What a run is, and what it leaves in its directory. Nothing here imports torch."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml
from omegaconf import OmegaConf

from lockstep.config import Config, Target
from lockstep.errors import UsageError
from lockstep.placement import Placement
from lockstep.results import Result, code_version, git_commit, read_result, write_atomically
from lockstep.rundir import config_file
from lockstep.sizes import BatchSizes


class Task(Protocol):
    """What a run does in each of its processes in the place of training; it travels by pickle."""

    @property
    def title(self) -> str:
        """For the line at the start: what is done to what."""

    def __call__(self, built: Any, run: Run, /) -> Result:
        """`lockstep.build.Built` to an outcome with ``metrics``, the same on every rank."""


@dataclass(frozen=True)
class Run:
    """One run, as it travels into its processes."""

    config: Config
    placement: Placement
    sizes: BatchSizes
    optimizer: Target
    """That of the config with its rate scaled, if the config asks for it."""
    directory: Path
    overrides: list[str]
    hydra: dict[str, Any]
    """Hydra's own config of this job, resolved: for `HydraConfig` and the job's logging."""
    started: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    resumed: bool = False
    """The directory holds this run already; it goes on."""
    config_digest: str = ""
    """Tells the job of a sweep from its other jobs."""
    checkpoint: Path | None = None
    """Where training goes on from; None: from the start."""
    task: Task | None = None
    """None: to train and test."""


@contextmanager
def claimed(run: Run) -> Iterator[None]:
    """Hold the run's directory: no other process may write to it, even after it was resumed.

    The kernel lets go of the lock when this process ends, however it ends.
    """
    run.directory.mkdir(parents=True, exist_ok=True)
    with locked(run.directory):
        claim(run)
        yield


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Raises `UsageError` when another process holds the directory."""
    handle = _lock(directory)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _lock(directory: Path) -> int | None:
    """A locked handle; None on Windows, and on file systems that have no locks."""
    if sys.platform == "win32":
        return None
    import fcntl

    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            return None
        raise UsageError(
            f"A run is writing to {directory}. Wait until it has ended, or end it."
        ) from None
    return handle


def claim(run: Run) -> None:
    """Take the directory for this run: refuse one that holds another, then write the config.

    The config is written so that it can be run again, from the project's directory:
    ``python train.py --config-dir <directory>/.hydra --config-name config``.
    """
    existing = run.directory / "result.json"
    if existing.exists() and not run.resumed:
        raise UsageError(
            f"The run directory must not hold another run; {run.directory} has one "
            f"(status: {read_result(existing).get('status', 'unknown')}). "
            "Choose another hydra.run.dir, or move that directory away."
        )
    config = _portable(OmegaConf.to_container(OmegaConf.structured(run.config)), run.directory)
    header = "# The resolved config of this run. To run it again, from the project's directory:\n"
    command = f"# python train.py --config-dir '{run.directory}/.hydra' --config-name config\n"
    defaults = {"defaults": ["schema", {"hydra": "default"}, "_self_"]}
    text = yaml.safe_dump(defaults) + yaml.safe_dump(config, sort_keys=False)
    write_atomically(config_file(run.directory), header + command + text)
    write_atomically(run.directory / ".hydra" / "overrides.yaml", yaml.safe_dump(run.overrides))
    write_result(run, {"status": "running"})


def _portable(value: Any, directory: Path) -> Any:
    """Paths in the run's directory become those of whichever run reads the config next."""
    if isinstance(value, dict):
        return {key: _portable(item, directory) for key, item in value.items()}
    if isinstance(value, list):
        return [_portable(item, directory) for item in value]
    if isinstance(value, str) and Path(value).is_relative_to(directory):
        return value.replace(str(directory), "${hydra:runtime.output_dir}", 1)
    return value


def write_result(run: Run, outcome: Result) -> Result:
    """Write ``result.json``: what was asked for, then ``outcome``; returns both together."""
    config, placement = run.config, run.placement
    sizes = run.sizes
    result = {
        "status": "unknown",
        "error": None,
        "strategy": placement.strategy,
        "accelerator": placement.accelerator,
        "devices": placement.devices,
        "num_nodes": placement.num_nodes,
        "world_size": placement.world_size,
        "global_batch_size": sizes.global_,
        "per_process_batch_size": sizes.per_process,
        "accumulate_grad_batches": config.trainer.accumulate_grad_batches,
        "effective_batch_size": sizes.effective,
        "learning_rate": run.optimizer.get("lr"),
        "seed": config.seed,
        "overrides": run.overrides,
        "objective": config.objective,
        "notes": config.notes,
        "directory": str(run.directory),
        "resumed_from": str(run.checkpoint) if run.checkpoint else None,
        "git_commit": git_commit(),
        "code": code_version(),
        "config_digest": run.config_digest,
        "task": None if run.task is None else run.task.title,
        "wall_time_s": time.time() - run.started,
        **outcome,
    }
    write_atomically(run.directory / "result.json", json.dumps(result, indent=2) + "\n")
    return result


def record_refusal(directory: Path, overrides: list[str], error: str) -> None:
    """Leave a ``result.json`` for a run that was refused before it had anything to write."""
    path = directory / "result.json"
    if not path.exists():
        refusal = {"status": "failed", "error": error, "overrides": overrides}
        write_atomically(path, json.dumps(refusal, indent=2) + "\n")


def record_death(directory: Path, overrides: list[str], error: str) -> None:
    """Finish the ``result.json`` of a run whose processes are gone."""
    path = directory / "result.json"
    result = read_result(path) if path.exists() else {"overrides": overrides}
    if result.get("status") in (None, "running", "unreadable"):
        result |= {"status": "failed", "error": error}
        write_atomically(path, json.dumps(result, indent=2) + "\n")
