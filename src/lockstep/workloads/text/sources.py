"""The sources of Python's standard library: which files, in which split, and what was read."""

from __future__ import annotations

import hashlib
import logging
import platform
import re
import sys
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import UsageError

log = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
DEFINITION = re.compile(rb"(?m)^[ \t]*(?:@.*\n[ \t]*)*(?:async def|def|class)\b")


def stdlib() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def top_level_modules() -> list[Path]:
    """Every ``.py`` file at the top of the standard library, sorted by name.

    Raises `UsageError` where a Python was installed without its sources.
    """
    names = sys.stdlib_module_names  # what a distribution puts beside them is left out
    return _found([path for path in stdlib().glob("*.py") if path.stem in names], stdlib())


def modules_of(package: str) -> list[Path]:
    """Every ``.py`` file of a package of the standard library that holds something, sorted; some
    versions of Python keep a package's tests in it, and those are left out."""
    folder = stdlib() / package
    if package not in sys.stdlib_module_names or not (folder / "__init__.py").is_file():
        there = sorted(path.parent.name for path in stdlib().glob("*/__init__.py"))
        raise UsageError(
            f"data.datasets.topics must be packages of the standard library; got {package}. "
            f"Python {platform.python_version()} has: {', '.join(there)}."
        )
    paths = [path for path in folder.rglob("*.py") if path.stat().st_size]
    return _found(
        [path for path in paths if not {"test", "tests"} & {*path.relative_to(folder).parts}],
        folder,
    )


def split_of(path: Path) -> str:
    """Eight of ten files are for training. By a hash of the name: a file stays in its split when
    another version of Python has more files or fewer."""
    name = path.relative_to(stdlib()).as_posix().encode()
    return {0: "val", 1: "test"}.get(zlib.crc32(name) % 10, "train")


def starts_of(text: bytes) -> list[int]:
    """Where functions, methods and classes begin, with their decorators."""
    return [match.start() for match in DEFINITION.finditer(text)]


def log_read(name: str, read: Sequence[tuple[Path, bytes]], words: str) -> str:
    """Say what was read, by its digest: another Python has other sources, and other scores."""
    digest = hashlib.sha256()
    for path, content in read:
        digest.update(path.relative_to(stdlib()).as_posix().encode() + b"\0" + content + b"\0")
    short = digest.hexdigest()[:12]
    log.info("%s: %s, Python %s, sha256 %s", name, words, platform.python_version(), short)
    return short


def _found(paths: list[Path], folder: Path) -> list[Path]:
    if not paths:
        raise UsageError(
            f"The standard library's sources must be readable; {folder} holds no .py files. "
            "Use a Python that is installed with its sources, such as one from python.org."
        )
    return sorted(paths)
