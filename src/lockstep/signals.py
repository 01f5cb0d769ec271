"""How a process leaves when it is told to: in order, once, with the status that shells expect."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from types import FrameType

_leaving = threading.Event()


def leave(signum: int, _: FrameType | None) -> None:
    """Raise SystemExit(128 + signum), unless this process is on its way out already: a signal must
    not cut the clean-up short. Whoever sent it kills after a grace period."""
    if not _leaving.is_set():
        _leaving.set()
        raise SystemExit(128 + signum)


def leave_on_sigterm() -> None:
    """Make SIGTERM (and a closed terminal) end this process as an exception does."""
    _leaving.clear()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)
        if hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, leave)


def leaving() -> None:
    """From here on `leave` does nothing: an exception has begun to end this process."""
    _leaving.set()


def leave_with_parent(grace_s: float) -> None:
    """Watch the process that asked for this one, and leave when it is gone: no orphans.

    A fork server's children are not children of that process, so the kernel does not tell them.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "only for processes started by multiprocessing"

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, name="leave_with_parent", daemon=True).start()


def own_group() -> None:
    """Leave the terminal's process group: Ctrl-C then reaches the launching process alone, which
    passes it on once."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
