"""The rows of the table: what is run, what it is compared with, and which value is wanted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.timing import TYPO, Clock, alternate

HYDRA = "python -c 'import hydra'"
HELP = "python train.py --help"
IMPORTS = "python -c 'import torch, lightning.pytorch, hydra'"
RUN = "python train.py"
JOBS = 8
SWEEP = f"python train.py -m trainer.strategy=ddp trainer.devices=2 'seed=range({JOBS})'"
AT_ONCE = "python train.py -m seed=1,2 trainer.max_epochs=1600 launch.threads=1"
"""Two jobs of about a minute, in one thread each."""
JOB = "python train.py trainer.strategy=ddp trainer.devices=2 seed={seed}"


@dataclass(frozen=True)
class Row:
    """One command beside another, as measured in alternation."""

    command: str
    seconds: list[float]
    baseline: str
    baseline_seconds: list[float]
    ratio: float
    """Median over the rounds of ``seconds`` / ``baseline_seconds``."""
    value: float
    """What the target is about."""
    unit: str
    target: float | None = None

    @property
    def met(self) -> bool | None:
        """With the value as the table shows it."""
        return None if self.target is None else round(self.value, 2) <= self.target


def measure(clock: Clock, runs: int, directory: Path) -> Iterator[Row]:
    for command in (HYDRA, HELP, IMPORTS):  # once untimed: bytecode and libraries off the disk
        clock(command)
    yield from before_torch(clock, runs)
    yield default_run(clock, runs)
    yield from sweep(clock, directory)
    yield two_at_once(clock)


def before_torch(clock: Clock, runs: int) -> Iterator[Row]:
    """What a person waits for without any training: help, and a typo's error."""
    base, *columns = alternate(clock, [HYDRA, HELP, TYPO], runs)
    for command, taken in zip((HELP, TYPO), columns, strict=True):
        yield Row(command, taken, HYDRA, base, ratio(taken, base), median(taken), "s", 0.7)


def default_run(clock: Clock, runs: int) -> Row:
    """A whole run beside the imports that no run can do without."""
    base, taken = alternate(clock, [IMPORTS, RUN], runs)
    times = ratio(taken, base)
    return Row(RUN, taken, IMPORTS, base, times, times, "times", 1.25)


def sweep(clock: Clock, directory: Path) -> Iterator[Row]:
    """One sweep between two separate runs, whose median stands for each of ``JOBS`` such runs."""
    first, whole, last = (clock(c) for c in (JOB.format(seed=0), SWEEP, JOB.format(seed=1)))
    separate = JOBS * median([first, last])
    label = f"{JOBS} x {JOB.format(seed='k')}"
    share = whole / separate
    yield Row(SWEEP, [whole], label, [separate], share, share, "times")
    later = job_seconds(directory)[1:]
    each = median([first, last])
    yield Row(
        f"one job of that sweep after the first (median of {len(later)})",
        later,
        JOB.format(seed="k"),
        [first, last],
        median(later) / each,
        median(later),
        "s",
        1.2,
    )


def two_at_once(clock: Clock) -> Row:
    """Over two slots, beside one after the other: the target is 1.7 times as fast."""
    over_slots = f"{AT_ONCE} hydra/launcher=slots hydra.launcher.slots=2"
    after, at_once = clock(AT_ONCE), clock(over_slots)
    share = at_once / after
    return Row(over_slots, [at_once], AT_ONCE, [after], share, share, "times", 0.59)


def job_seconds(directory: Path) -> list[float]:
    """``wall_time_s`` of a sweep's jobs, in their order."""
    paths = sorted(directory.glob("multirun/**/result.json"), key=lambda p: int(p.parent.name))
    return [json.loads(path.read_text())["wall_time_s"] for path in paths]


def ratio(taken: list[float], base: list[float]) -> float:
    return median(mine / other for mine, other in zip(taken, base, strict=True))
