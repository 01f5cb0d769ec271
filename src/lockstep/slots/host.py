"""A process that runs jobs one after the other, each in fresh processes of its own.

A host lives as long as the sweep: its fork server imports torch once. It is forked from the
launching process, which has imported neither torch nor started a thread, so it knows the task and
Hydra's state as they are.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hydra.core.utils import run_job
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from lockstep.console import CONSOLE, redirect
from lockstep.errors import UsageError, one_line
from lockstep.signals import leave_on_signals, leave_with_parent, own_group, stop

GRACE_S = 10.0
"""Seconds that a host whose parent is gone gets to end its job."""


@dataclass(frozen=True)
class Ended:
    """How a job ended, as its host tells it."""

    value: Any = None
    error: str | None = None
    usage: bool = False
    """The error is one that a person can mend."""


class Host:
    def __init__(self, hydra_context: HydraContext, task: TaskFunction, log: Path) -> None:
        forking = multiprocessing.get_context("fork")
        self.connection, theirs = forking.Pipe()
        self.process = forking.Process(target=_serve, args=(theirs, hydra_context, task, log))
        self.process.start()
        theirs.close()

    def start(self, config: DictConfig, environment: Mapping[str, str], directory: Path) -> None:
        self.connection.send((config, dict(environment), directory))

    def ended(self) -> Ended:
        """After its connection or its sentinel was ready: how the job ended."""
        with suppress(EOFError, ConnectionResetError):
            if self.connection.poll():
                told: Ended = self.connection.recv()
                return told
        self.process.join()
        code = self.process.exitcode or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with {code}"
        return Ended(error=f"the process that hosted this job {how}; console.log may tell more")

    def dismiss(self) -> None:
        """Let an idle host go."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(None)

    def signal(self, number: int) -> None:
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, number)

    def end(self, within_s: float) -> None:
        """Wait for its end, then insist."""
        self.process.join(within_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()


def _serve(
    connection: Connection, hydra_context: HydraContext, task: TaskFunction, log: Path
) -> None:
    own_group()  # Ctrl-C reaches the launching process alone, which passes it on
    leave_on_signals()
    leave_with_parent(GRACE_S, gone=_when_orphaned)
    redirect(log)
    before = dict(os.environ)
    try:
        while (job := connection.recv()) is not None:
            config, environment, directory = job
            os.environ.update(environment | {CONSOLE: str(directory / "console.log")})
            redirect(directory / "console.log")
            ended = _run(hydra_context, task, config)
            redirect(log)
            os.environ.clear()
            os.environ.update(before)
            connection.send(ended)
    except EOFError:
        pass  # the launching process is gone
    except (KeyboardInterrupt, SystemExit):
        sys.exit(stop.status)


def _when_orphaned() -> None:
    """A forked process is its parent's child. What multiprocessing waits for instead, the end of a
    pipe, is held open by each host that was forked later."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.2)


def _run(hydra_context: HydraContext, task: Callable[[Any], Any], config: DictConfig) -> Ended:
    try:
        job = run_job(
            hydra_context=hydra_context,
            task_function=task,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
    except Exception as error:  # of Hydra's, around the task: this job's, not the host's
        traceback.print_exc()
        return Ended(error=one_line(error))
    value = job._return_value  # the property raises, and prints
    if isinstance(value, Exception):
        return Ended(error=one_line(value), usage=isinstance(value, UsageError))
    return Ended(value)
