"""How the end of a rank reaches the launching process: by notes in a folder that both know."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.errors import RunFailed, UsageError, as_usage_error, one_line
from lockstep.record import Run
from lockstep.results import write_atomically
from lockstep.signals import STATUSES, stop

log = logging.getLogger(__name__)

PEER_DELAY_S = 0.5


@dataclass(frozen=True)
class Failure:
    """Why a rank ended, as it crosses from the rank to the launching process."""

    rank: int
    time: float
    summary: str
    traceback: str
    usage: bool
    """The summary says it all: a person can mend it without the traceback."""
    stopped: int | None = None
    """The signal that told this rank, and no other process, to stop."""


def sign_in(notes: Path, rank: int) -> None:
    """Leave this rank's process id, for its peers and the launching process."""
    write_atomically(notes / f"rank{rank}.pid", str(os.getpid()))
    stop.peers_are_well = lambda: peers_are_well(notes)


def peers_are_well(notes: Path) -> bool:
    """No rank of this run has failed or is gone: a signal then means this run, not a failure."""
    return not any(notes.glob("rank*.json")) and all(map(_is_alive, _pids(notes)))


def _pids(notes: Path) -> list[int]:
    return [int(path.read_text()) for path in notes.glob("rank*.pid")]


def _is_alive(pid: int) -> bool:
    if sys.platform == "win32":
        return True  # there, signal 0 is Ctrl-C
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def end_left_behind(notes: Path) -> None:
    """Ranks whose fork server was killed look as if they had ended."""
    if sys.platform == "win32":
        return  # there is no fork server
    for pid in _pids(notes):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def noting_failure(run: Run, notes: Path, rank: int) -> Iterator[None]:
    """Write down why this rank failed, then leave with status 1."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if stop.asked is None:
            raise
        if peers_are_well(notes):
            summary = "was told to stop"
            stopped = Failure(
                rank, time.time(), summary, traceback="", usage=False, stopped=stop.asked
            )
            _note(notes, stopped)
        sys.exit(stop.status)
    except BaseException as error:
        usage = as_usage_error(error)
        summary = one_line(usage or error)
        text = traceback.format_exc()
        _note(notes, Failure(rank, time.time(), summary, text, usage is not None))
        # A rank that was killed breaks its peers' connections at once: let the agent, which looks
        # every 0.05 s, see it before it sees them.
        time.sleep(PEER_DELAY_S if run.placement.world_size > 1 else 0)
        sys.exit(1)


def _note(notes: Path, failure: Failure) -> None:
    write_atomically(notes / f"rank{failure.rank}.json", json.dumps(asdict(failure)))


def raise_cause(notes: Path, exit_codes: dict[int, int]) -> None:
    """Log the failure that came first and raise it: `UsageError`, `RunFailed`, or what ends this
    process as the signal did that a rank was sent.

    A rank that was killed leaves no note, and its peers' notes only tell of a lost connection; so
    a killed rank comes before any note. SIGTERM is what this process sends to the others.
    """
    failures = sorted(
        (Failure(**json.loads(path.read_text())) for path in notes.glob("rank*.json")),
        key=lambda failure: failure.time,
    )
    noted = {failure.rank for failure in failures}
    silent = {
        rank: code
        for rank, code in exit_codes.items()
        if rank not in noted and code not in (0, -signal.SIGTERM, *STATUSES)
    }
    if silent and set(silent.values()) == {255} and len(silent) == len(exit_codes):
        raise RunFailed("the fork server that the run's processes came from is gone (killed?)")
    if silent:
        rank, code = next(iter(silent.items()))
        message = f"rank {rank} {_describe_exit(code)}"
        log.error(message)
        raise RunFailed(message)
    if not failures:
        raise RunFailed(f"the processes ended without a result; exit statuses {exit_codes}")
    first = failures[0]
    stop.asked = stop.asked or first.stopped
    if first.stopped == signal.SIGINT:
        raise KeyboardInterrupt
    if first.stopped is not None:
        raise SystemExit(128 + signal.SIGTERM)
    if first.usage:
        raise UsageError(first.summary)
    log.error("rank %d failed:\n%s", first.rank, first.traceback.rstrip())
    raise RunFailed(f"rank {first.rank}: {first.summary}")


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"left with exit status {code} in the middle of the run"
    hint = " (is the machine out of memory?)" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"
