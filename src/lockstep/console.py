"""Where processes write what a terminal would show."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TextIO

from typing_extensions import override

CONSOLE = f"{__package__}_CONSOLE".upper()
"""The file that the processes of a run write to instead of the terminal."""


class Terminal(logging.StreamHandler[TextIO]):
    """The log on standard output; silent once its reader has gone, as that of ``| head`` does.

    The run goes on, for its files have it all.
    """

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            super().handleError(record)
            return
        silence(self.stream)


def silence(stream: TextIO) -> None:
    """Let a stream that nobody reads lead nowhere: for print, too, and the flush at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


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
