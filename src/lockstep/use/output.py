"""The file that a command writes: where, in which format, and whether it can."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from lockstep.errors import UsageError


def output_file(
    output: Path | None, default: Path, formats: Mapping[str, tuple[str, tuple[str, ...]]]
) -> Path:
    """The file to write. ``formats`` has for each suffix the extra and the packages it needs.

    Raises `UsageError` for a suffix that is none of these, a package that is missing, a file that
    is there already, and a place that cannot be written.
    """
    path = output or default
    if path.suffix not in formats:
        known = ", ".join(formats)
        raise UsageError(
            f"output must end in one of {known}; got {path.name}. The suffix says the format."
        )
    extra, packages = formats[path.suffix]
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"A {path.suffix} file needs {', '.join(missing)}, which is not installed. "
            f"Use: pip install -e '.[{extra}]'"
        )
    if path.exists():
        raise UsageError(
            f"output must be a new file; {path} exists. Choose another name, or move it away."
        )
    place = next(folder for folder in path.parents if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise UsageError(
            f"output must lie where files can be written; {place} "
            f"{'cannot be written' if place.is_dir() else 'is a file'}. Use output=<another place>."
        )
    return path
