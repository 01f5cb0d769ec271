"""Where processes write what a terminal would show."""

from __future__ import annotations

import os
import sys
from pathlib import Path

CONSOLE = f"{__package__}_CONSOLE".upper()
"""The file that the processes of a run write to instead of the terminal."""


def redirect(path: Path) -> None:
    """Append what this process, and what it starts, writes to the terminal to a file instead."""
    sys.stdout.flush()
    sys.stderr.flush()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.close(handle)


def redirect_if_told() -> None:
    if CONSOLE in os.environ:
        redirect(Path(os.environ[CONSOLE]))
