"""Runs as their files tell of them."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.results import Result, read_result

History = dict[str, list[tuple[int, float, float]]]
"""Metric -> its (step, seconds, value)."""


@dataclass(frozen=True)
class Job:
    name: str
    directory: Path
    result: Result
    overrides: dict[str, str]
    history: History

    @property
    def finished(self) -> bool:
        return bool(self.result.get("status") == "finished")

    @property
    def devices(self) -> int:
        devices = self.result.get("devices", 1)
        return len(devices) if isinstance(devices, list) else int(devices)


def read_jobs(directories: Iterable[Path]) -> list[Job]:
    """The runs in and below some directories, those of a sweep in the order of their numbers.

    Raises `UsageError` for a directory without any.
    """
    jobs = []
    for directory in directories:
        paths = sorted(directory.glob("**/result.json"), key=_order)
        if not paths:
            raise UsageError(
                f"A report needs directories of runs or sweeps; {directory} holds no result.json. "
                "Look in multirun/ and outputs/."
            )
        jobs += [read_job(path, directory) for path in paths]
    return jobs


def read_job(path: Path, root: Path) -> Job:
    result = read_result(path)
    overrides = dict(split_override(item) for item in result.get("overrides", []))
    inner = path.parent.relative_to(root).as_posix()
    name = path.parent.name if inner == "." else inner
    return Job(name, path.parent, result, overrides, read_history(path.parent / "metrics.csv"))


def split_override(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+"), value


def read_history(path: Path) -> History:
    """The columns of a ``metrics.csv``; empty when there is none."""
    history: History = {}
    if not path.exists():
        return history
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, text in row.items():
                if name not in ("step", "epoch", "seconds") and text:
                    place = (int(row["step"]), float(row["seconds"]), float(text))
                    history.setdefault(name, []).append(place)
    return history


def varied_keys(jobs: list[Job]) -> list[str]:
    """The keys whose values differ between the jobs, in the order of the command line."""
    keys = dict.fromkeys(key for job in jobs for key in job.overrides)
    varied = [key for key in keys if len({job.overrides.get(key) for job in jobs}) > 1]
    return [key for key in varied if key not in ("resume", "sweep.resume")]


def common_overrides(jobs: list[Job]) -> list[str]:
    """``key=value`` of what all jobs share."""
    varied = varied_keys(jobs)
    shared = jobs[0].overrides if jobs else {}
    return [f"{key}={value}" for key, value in shared.items() if key not in varied]


def _order(path: Path) -> tuple[Any, ...]:
    name = path.parent.name
    return (path.parent.parent, int(name) if name.isdigit() else sys.maxsize, name)
