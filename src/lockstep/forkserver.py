"""Imported by the fork server, before it forks."""

from __future__ import annotations

import os
import threading

from lockstep.preload import FOR_FORKS, preload

LOOK_S = 0.1


def preload_for(parent: int) -> None:
    """Import what the children need, and leave at once if the process that wants it is gone.

    The fork server itself looks only when its imports are done, seconds later; until then it would
    hold the terminal or the pipe that it was started with.
    """
    done = threading.Event()
    watcher = threading.Thread(target=_leave_with, args=(parent, done), daemon=True)
    watcher.start()
    try:
        preload(FOR_FORKS)
    finally:
        done.set()
        watcher.join()  # no thread may live where processes are forked


def _leave_with(parent: int, done: threading.Event) -> None:
    while not done.wait(LOOK_S):
        if os.getppid() != parent:
            os._exit(1)


preload_for(os.getppid())
