"""The two ways in which a run ends badly, and what a person reads then."""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path

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
        what = "read or written" if error.errno in (errno.EACCES, errno.EPERM) else "written"
        return UsageError(
            f"{path} cannot be {what}: {error.strerror}. What was written before is kept. "
            "Make room, or use hydra.run.dir=<a directory that can be written>."
        )
    for cause in causes(error):
        if _could_not_start_loader(cause):
            return UsageError(
                "data.num_workers > 0 sends the data set and its collate function to the loader "
                f"processes by pickle, which failed with {type(cause).__name__}: {cause}. Define "
                "that class or function at the top of a file, open files in __getitem__, or use "
                "data.num_workers=0."
            )
    return None


def as_not_located(error: BaseException, target: str) -> BaseException:
    """For Hydra's "Error locating target": what a module that is there raised at its import, else a
    `UsageError` that says what is not there."""
    *_, first = causes(error)
    named = re.search(r"Error locating target '([^']+)'", str(error))
    target = named[1] if named else target  # one inside another
    if isinstance(first, ModuleNotFoundError):
        there = not f"{target}.".startswith(f"{first.name}.")  # it is another one that is missing
    else:
        there = not isinstance(first, AttributeError | ImportError)
    if there:
        return first
    return UsageError(
        f"{target} is not there ({one_line(first)}). Is the name right, and its package installed?"
    )


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


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """`` Did you mean ...?`` for the end of a message; empty where no choice is near."""
    by_lower = {choice.lower(): choice for choice in choices}
    near = get_close_matches(str(name).lower(), list(by_lower), n=1, cutoff=0.5)
    return f" Did you mean {by_lower[near[0]]}?" if near else ""


def causes(error: BaseException) -> Iterator[BaseException]:
    """``error``, and what it was raised from or while handling, back to the first one."""
    current: BaseException | None = error
    seen: set[int] = set()  # an exception that is raised again may be its own cause
    while current is not None and id(current) not in seen:
        yield current
        seen.add(id(current))
        current = current.__cause__ or current.__context__


def _could_not_start_loader(error: BaseException) -> bool:
    """By the frames that raised it: pickle has no one exception for what it cannot do, and
    Lightning's saving of a checkpoint on an error then fails with another one."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    places = {(*Path(code.co_filename).parts[-2:], code.co_name) for code in codes}
    starting = any(parts[:2] == ("data", "dataloader.py") for parts in places)
    return starting and ("multiprocessing", "reduction.py", "dump") in places
