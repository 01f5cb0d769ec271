"""What a process does when it is told to stop: finish its step and save, or leave at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = [
    getattr(signal, name)
    for name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
    if hasattr(signal, name)
]
"""A scheduler's notice, the same by another name, a closed terminal, Ctrl-C."""
STATUSES = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""What a process leaves with: after Ctrl-C, and after any of the others."""
ONE_KEY_S = 0.5
"""Signals this close are one: ``timeout -s INT`` sends its command one, then its whole group."""


class Stop:
    """This process's answer to signals; one per process, as handlers are.

    Outside of training a signal ends the process as an exception does. In training it is noted in
    ``asked``, and `lockstep.callbacks.stop_together` ends all ranks after the same step.
    A second signal after Ctrl-C, or a peer that is gone, leaves nothing to wait for.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As nobody had asked yet."""
        self.asked: int | None = None
        self.asked_at = 0.0
        self.leaving = False
        self.deferred = False
        self.answered = False
        """The step has ended and its state is saved: only leaving is left."""
        self.peers_are_well: Callable[[], bool] = lambda: True

    def handle(self, signum: int, _: FrameType | None) -> None:
        if self.leaving:
            return  # a signal must not cut the clean-up short; whoever sent it kills after a while
        now = time.monotonic()
        insists = self.asked == signal.SIGINT and now - self.asked_at > ONE_KEY_S
        if self.asked is None:
            self.asked, self.asked_at = signum, now
        if not self.deferred or insists or not self.peers_are_well():
            self.leave()

    @property
    def status(self) -> int:
        return STATUSES[self.asked != signal.SIGINT]

    def leave(self) -> None:
        """Raise KeyboardInterrupt (exit status 130) or SystemExit(143)."""
        self.leaving = True
        if self.asked == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(self.status)

    def leave_if_asked(self) -> None:
        """Where deferring ends."""
        self.deferred = False
        if self.asked is not None and not self.leaving:
            self.leave()


stop = Stop()


def leave_on_signals() -> None:
    """Install the handlers of `stop` in this process, as nobody had asked yet."""
    stop.reset()
    reinstall()


def reinstall() -> None:
    """Put the handlers back where a library has put its own."""
    if threading.current_thread() is threading.main_thread():
        for number in STOPPING:
            signal.signal(number, stop.handle)


@contextmanager
def ignoring_signals() -> Iterator[None]:
    """Programs that are started in here ignore what is meant for the run's own processes.

    A scheduler signals every process of a run. Were the fork server to die of it, its children
    would look dead to the launching process while they save.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_with_parent(grace_s: float, gone: Callable[[], None] | None = None) -> None:
    """Watch the process that asked for this one, and leave when it is ``gone``: no orphans.

    A fork server's children are not children of that process, so the kernel does not tell them.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "only for processes started by multiprocessing"

    def watch() -> None:
        (gone or parent.join)()
        stop.peers_are_well = lambda: False
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, name="leave_with_parent", daemon=True).start()


def own_group() -> None:
    """Leave the terminal's process group: Ctrl-C then reaches the launching process alone, which
    passes it on once."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
