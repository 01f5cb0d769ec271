"""The two ways in which a run ends badly, and what a person reads then."""

from __future__ import annotations

import errno
import traceback

DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}


class UsageError(ValueError):
    """Something a person can mend: the message names the rule, the value and the repair."""


class RunFailed(RuntimeError):
    """A run ended with an error that has been logged; the message is its last line."""


def as_usage_error(error: BaseException) -> UsageError | None:
    """The error of a person, where ``error`` is one; None where the traceback is needed.

    A full or read-only disk is met in the middle of a run, by whatever writes next.
    """
    if isinstance(error, UsageError):
        return error
    if isinstance(error, OSError) and error.errno in DISK:
        path = error.filename2 or error.filename or "The run directory"
        return UsageError(
            f"{path} cannot be written: {error.strerror}. What was written before is kept. "
            "Make room, or use hydra.run.dir=<a directory that can be written>."
        )
    return None


def one_line(error: BaseException) -> str:
    """Name and message; of a message that quotes a traceback, its first and its last line. An
    exception of ours says it all without its name."""
    text = str(error)
    if not isinstance(error, UsageError | RunFailed):
        text = traceback.format_exception_only(error)[-1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "Traceback" in text:
        lines = list(dict.fromkeys([lines[0], lines[-1]]))
    return " ".join(lines)
