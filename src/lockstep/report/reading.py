"""Runs as their files tell of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from lockstep.errors import UsageError
from lockstep.history import History, read_history
from lockstep.plan import GOING_ON, LOADER, not_started, split_override
from lockstep.results import DONE, Result, read_result
from lockstep.rundir import config_file


@dataclass(frozen=True)
class Job:
    name: str
    """Unique within a report."""
    directory: Path
    result: Result
    overrides: dict[str, str]
    history: History

    @property
    def finished(self) -> bool:
        return bool(self.result.get("status") == "finished")

    @property
    def measured(self) -> bool:
        """It ended as it should: finished, or pruned by a search."""
        return self.result.get("status") in DONE

    @property
    def devices(self) -> int:
        """Of all nodes together."""
        devices = self.result.get("devices", 1)
        local = len(devices) if isinstance(devices, list) else int(devices)
        return local * int(self.result.get("num_nodes", 1))

    @property
    def known(self) -> bool:
        """Whether its overrides are: not of a torn result without a ``.hydra/``."""
        return bool(self.overrides) or self.finished

    @property
    def searched(self) -> bool:
        """Whether it is a trial of a search, which says itself what it found."""
        return (self.directory.parent / "search.json").exists()

    @cached_property
    def _config(self) -> Any:
        path = config_file(self.directory)
        return yaml.load(path.read_text(), Loader=LOADER) if path.is_file() else None

    def setting(self, key: str) -> str | None:
        """What was given for ``key``; else what the run's config has there, but no group."""
        if key in self.overrides:
            return self.overrides[key]
        value = self._config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None or isinstance(value, dict):
            return None
        return value if isinstance(value, str) else json.dumps(value)


def read_jobs(directories: Iterable[Path]) -> list[Job]:
    """The runs in and below some directories, those of a sweep in the order of their numbers.

    Raises `UsageError` for a directory without any.
    """
    roots = [directory.resolve() for directory in directories]
    # Jobs of several sweeps have the same numbers: their names then begin with what differs.
    top = Path(os.path.commonpath(roots))
    jobs = []
    for directory, root in zip(directories, roots, strict=True):
        if not any(root.glob("**/result.json")):
            raise UsageError(
                f"A report needs directories of runs or sweeps; {directory} holds no result.json. "
                "Look in multirun/ and outputs/."
            )
        jobs += [read_job(run, top) for run in sorted(_runs(root), key=_order)]
        jobs += [
            job for plan in sorted(root.glob("**/multirun.yaml")) for job in _missing(plan, top)
        ]
    return jobs


def _missing(plan: Path, top: Path) -> list[Job]:
    sweep = plan.parent
    found = [read_result(path).get("overrides", []) for path in sweep.glob("*/result.json")]
    missing = []
    for number, overrides in not_started(plan, found):
        directory = sweep / str(number)
        given = dict(split_override(item) for item in overrides)
        name = directory.relative_to(top).as_posix()
        missing.append(Job(name, directory, {"status": "not started"}, given, {}))
    return missing


def _runs(root: Path) -> set[Path]:
    """Directories of runs: what was ended before it had a result has its overrides."""
    results = {path.parent for path in root.glob("**/result.json")}
    return results | {path.parent.parent for path in root.glob("**/.hydra/overrides.yaml")}


def read_job(directory: Path, top: Path) -> Job:
    path = directory / "result.json"
    missing = {"status": "no result", "error": "it was ended before it wrote result.json"}
    result = read_result(path) if path.exists() else missing
    given = result["overrides"] if "overrides" in result else _given(directory)
    overrides = dict(split_override(item) for item in given)
    inner = directory.relative_to(top).as_posix()
    name = directory.name if inner == "." else inner
    return Job(name, directory, result, overrides, read_history(directory / "metrics.csv"))


def _given(directory: Path) -> list[str]:
    path = directory / ".hydra" / "overrides.yaml"
    return list(yaml.safe_load(path.read_text()) or []) if path.exists() else []


def varied_keys(jobs: list[Job]) -> list[str]:
    """The keys whose values differ between the jobs, in the order of the command line."""
    known = [job for job in jobs if job.known]
    keys = dict.fromkeys(key for job in known for key in job.overrides)
    varied = [key for key in keys if len({job.overrides.get(key) for job in known}) > 1]
    return [key for key in varied if key not in GOING_ON]


def common_overrides(jobs: list[Job]) -> list[str]:
    """``key=value`` of what all jobs share."""
    varied = varied_keys(jobs)
    shared = next((job.overrides for job in jobs if job.known), {})
    return [f"{key}={value}" for key, value in shared.items() if key not in varied]


def _order(run: Path) -> tuple[Any, ...]:
    return (run.parent, int(run.name) if run.name.isdigit() else sys.maxsize, run.name)
