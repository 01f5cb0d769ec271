"""Commands as a person types them, run below a scratch directory and timed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TYPO = "python train.py trainer.devcies=2"
PROJECT = Path(__file__).resolve().parent.parent
RESULTS = PROJECT / "benchmarks" / "results"
Clock = Callable[[str], float]
"""Runs a command and returns its seconds."""


def results_file(name: str) -> Path:
    """Where a benchmark writes ``name``; git ignores it."""
    RESULTS.mkdir(exist_ok=True)
    return RESULTS / name


def clock_in(directory: Path, say: Callable[[str], None]) -> Clock:
    """A clock for commands whose outputs go below ``directory``."""

    def clock(command: str) -> float:
        taken = seconds(command, directory)
        say(f"{taken:7.2f} s  {command}")
        return taken

    return clock


def seconds(command: str, directory: Path) -> float:
    """Wall time of one command, the interpreter's start and end included."""
    started = time.perf_counter()
    completed(arguments(command), directory, status=1 if command == TYPO else 0)
    return time.perf_counter() - started


def completed(
    command: list[str], directory: Path, status: int = 0, threads: int | None = None
) -> str:
    """What a command has printed; ``threads`` is OMP_NUM_THREADS.

    Raises `RuntimeError` when it does not end as expected: how long a failure took says nothing.
    """
    env = environment() | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True)
    if done.returncode != status:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise RuntimeError(f"{' '.join(command)} left with status {done.returncode}:\n{said}")
    return done.stdout


def arguments(command: str) -> list[str]:
    """``python`` and ``torchrun`` are this interpreter's, the scripts the project's."""
    known = {
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "train.py": [str(PROJECT / "train.py")],
        "by_hand.py": [str(PROJECT / "benchmarks" / "by_hand.py")],
    }
    return [part for word in shlex.split(command) for part in known.get(word, [word])]


def environment() -> dict[str, str]:
    """This one without OMP_NUM_THREADS: lockstep shares out the cores, as by default
    (an elastic launcher or a batch system may have set it to 1)."""
    return {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}


def alternate(clock: Clock, commands: list[str], rounds: int) -> list[list[float]]:
    """Seconds of each command, one entry per round, run A B A B: a machine that slows down for a
    while slows all of them, and ratios within a round hardly notice."""
    turns = [[clock(command) for command in commands] for _ in range(rounds)]
    return [list(column) for column in zip(*turns, strict=True)]
