"""What was made of some files, kept until they change: made once, and never seen half made."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock

from lockstep.errors import UsageError

VERSION = 1
"""Of what is written; another one is made again."""


def cached(
    parts: Sequence[Path], recipe: object, directory: Path, make: Callable[[Path], None]
) -> Path:
    """The folder below ``directory`` that ``make`` has filled for these files and this ``recipe``.

    The ranks of a run, and runs at the same time, wait for the one that makes it; it gets its name
    when it is whole and on the disk. So a folder with that name is always whole, and one that was
    broken off is made again. Raises `UsageError` where ``parts`` change meanwhile.
    """
    entry = directory / digest(parts, recipe)
    if entry.is_dir():
        return entry
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / f"{entry.name}.lock"):
            if not entry.is_dir():  # another rank has been here
                _fill(entry, parts, recipe, make)
    except OSError as error:
        raise UsageError(
            f"{directory} must be a folder that converted columns can be written to; got: {error}. "
            "Use data.datasets.cache=<such a folder>."
        ) from error
    return entry


def digest(parts: Sequence[Path], recipe: object) -> str:
    """Of where the files are, their sizes and times: not of what is in them."""
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in parts]
    return hashlib.sha256(repr((VERSION, facts, recipe)).encode()).hexdigest()[:16]


def _fill(entry: Path, parts: Sequence[Path], recipe: object, make: Callable[[Path], None]) -> None:
    """Under the lock: whoever left a partial folder is dead."""
    partial = entry.with_name(f"{entry.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        make(partial)
        if digest(parts, recipe) != entry.name:
            raise UsageError(
                f"{parts[0]} must stay as it is while it is read; it has changed. Start again when "
                "it is written."
            )
        for path in partial.iterdir():
            with path.open("rb+") as file:  # Windows syncs only what may be written
                os.fsync(file.fileno())  # a name that outlives a power cut, with what it names
        partial.rename(entry)
    except BaseException:
        shutil.rmtree(partial)
        raise
