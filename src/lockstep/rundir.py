"""The name of a run's directory: the same on every rank, whatever started it."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import secrets
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lockstep.errors import UsageError
from lockstep.results import code_version, read_result


def run_directory(root: str, resume: str | None) -> str:
    """A new directory below ``root``; that of the run to go on with; or, for ``latest``, that of
    the run below ``root`` which was written to last, and had begun to train.

    Raises `UsageError` before anything is written to a directory that is none of a run to go on.
    """
    if resume is None:
        return f"{root}/{run_name()}"
    if resume != "latest":
        config_to_resume(Path(resume))
        return resume
    runs = (path.parent for path in Path(root).glob("*/*/result.json"))
    return str(_newest(filter(_may_go_on, runs), "resume", f"a run in {root}/ that began to train"))


def sweep_directory(root: str, resume: str | None) -> str:
    """The same for a sweep, whose jobs have directories below it."""
    if resume is None:
        return f"{root}/{run_name(sweep=True)}"
    if resume == "latest":
        jobs = (path.parent for path in Path(root).glob("*/*/*/result.json"))
        return str(_newest(jobs, "sweep.resume", f"a sweep in {root}/").parent)
    if not Path(resume).is_dir():
        raise UsageError(f"sweep.resume must name a sweep's directory; there is no {resume}.")
    return resume


def job_directory(*, _root_: DictConfig) -> str:
    """The number of a sweep's job; of one that a sweep which goes on has begun, its directory.

    Jobs are known by their config: numbers change when a grid does. One that finished with other
    code is run again, in a directory of its own.
    """
    number = str(_root_.hydra.job.num)
    if _root_.sweep.resume is None:
        return number
    results = {
        path.parent.name: read_result(path)
        for path in Path(_root_.hydra.sweep.dir).glob("*/result.json")
    }
    digest = config_digest(_root_)
    for name, result in results.items():
        other_code = result.get("status") == "finished" and result.get("code") != code_version()
        if result.get("config_digest") == digest and not other_code:
            return name
    if number not in results:
        return number
    return str(next_number(Path(_root_.hydra.sweep.dir)))


def config_file(run: Path) -> Path:
    """The resolved config of a run; where there is none, no run has begun."""
    return run / ".hydra" / "config.yaml"


def config_to_resume(run: Path) -> Path:
    """`config_file`. Raises `UsageError` where there is none, or not that of a training."""
    path = config_file(run)
    if not path.is_file():
        raise UsageError(
            f"resume must name the directory of a run; {run} holds none (no {path.name} in "
            f"{path.parent}). Look in outputs/, or use resume=latest."
        )
    if (task := _task(run)) is not None:
        raise UsageError(
            f"resume must name the directory of a run that trains; {run} is of {task}. Look in "
            "outputs/, or use resume=latest."
        )
    return path


def next_number(sweep: Path) -> int:
    """Above all jobs of a sweep, with those that have a directory and nothing in it yet."""
    given = (path.name for path in sweep.iterdir() if path.is_dir())
    return max((int(name) for name in given if name.isdigit()), default=-1) + 1


def config_digest(config: DictConfig) -> str:
    """Equal for jobs of one config, whatever their directories and numbers."""
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    kept = {key: value for key, value in plain.items() if key not in ("hydra", "sweep")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _newest(runs: Iterable[Path], key: str, wanted: str) -> Path:
    """The one whose result was written last."""
    found = sorted(runs, key=lambda run: (run / "result.json").stat().st_mtime_ns)
    if not found:
        raise UsageError(f"{key}=latest needs {wanted}; there is none. Use {key}=<directory>.")
    return found[-1]


def _may_go_on(run: Path) -> bool:
    """Whether it began to train; not a run that was refused, or a use of a trained model."""
    return config_file(run).is_file() and _task(run) is None


def _task(run: Path) -> str | None:
    path = run / "result.json"
    task: str | None = read_result(path).get("task") if path.is_file() else None
    return task


def run_name(sweep: bool = False) -> str:
    """``<date>/<time>-<id>``, drawn once by rank 0; under srun ``slurm/<job>.<step>``, so that a
    requeued job finds its directory again."""
    from lockstep.hosts.meeting import from_rank_zero, meeting, under_torchrun

    if under_torchrun():
        # Ranks start in different seconds, on machines with different clocks: rank 0's name holds,
        # and through torchrun's restarts its first one.
        return from_rank_zero("run_name", lambda: meeting().first("run_name", _drawn()))
    if "SLURM_STEP_ID" in os.environ and not (sweep and os.environ.get("SLURM_NTASKS") == "1"):
        return f"slurm/{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    return _drawn()


@functools.cache
def _drawn() -> str:
    """One name per command, however often a config is resolved."""
    return f"{datetime.now():%Y-%m-%d/%H-%M-%S}-{secrets.token_hex(2)}"


def new_run_name() -> None:
    """Draw another name for the next run of this process: a notebook has many."""
    _drawn.cache_clear()
