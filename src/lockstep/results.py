"""Files that a run leaves, and the code that it ran with."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Result = dict[str, Any]
DONE = ("finished", "pruned")
"""Statuses of a run that has nothing left to do."""


def read_result(path: Path) -> Result:
    """A ``result.json``; an unreadable one is a result whose status says so."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        return {"status": "unreadable", "error": str(error)}
    if not isinstance(result, dict):
        return {"status": "unreadable", "error": f"{path.name} must hold an object"}
    return result


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old text or the new one."""
    with replacing(path) as temporary:
        temporary.write_text(text)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` to write to: it takes that name when it is whole, else it goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def objective_value(
    objective: str | Sequence[str] | None, metrics: Mapping[str, Any]
) -> float | list[float] | None:
    """The metric, or the metrics, that an objective names; None where there is none to return.

    Raises `KeyError` for a name that is no metric.
    """
    if objective is None or isinstance(objective, str):
        key = objective_key(objective, metrics)
        return None if key is None else float(metrics[key])
    keys = [key for name in objective if (key := objective_key(name, metrics)) is not None]
    return [float(metrics[key]) for key in keys] if len(keys) == len(objective) else None


def objective_key(name: str | None, metrics: Mapping[str, Any]) -> str | None:
    """The metric that an objective means; where nothing was tested, that of validation.

    None where there is none to return. Raises `KeyError` for a name that is no metric.
    """
    if name is None or name in metrics:
        return name
    if not name.startswith("test/") or any(other.startswith("test/") for other in metrics):
        raise KeyError(name)
    instead = f"val/{name.removeprefix('test/')}"
    return instead if instead in metrics else None


def has_objective(objective: str | Sequence[str] | None, metrics: Mapping[str, Any]) -> bool:
    try:
        objective_value(objective, metrics)
    except KeyError:
        return False
    return True


@functools.cache
def git_commit() -> str | None:
    """The commit of the working directory, ``-dirty`` when files differ; None outside of git."""
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


@functools.cache
def code_version() -> str | None:
    """The commit, with a digest of what differs from it in tracked files; None outside of git."""
    commit = git_commit()
    if commit is None or not commit.endswith("-dirty"):
        return commit
    difference = _git("diff", "HEAD") or ""
    return f"{commit}-{hashlib.sha256(difference.encode()).hexdigest()[:16]}"


def _git(*arguments: str) -> str | None:
    command = ["git", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
