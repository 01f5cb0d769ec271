"""The rows of the table: what is run, what it is compared with, and which value is wanted."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.pairs import MB, ddp_beside, first_step_s, memory_while_running
from benchmarks.timing import PROJECT, TYPO, Clock, alternate, completed

HYDRA = "python -c 'import hydra'"
HELP = "python train.py --help"
CONFIG = "python train.py --cfg job"
TORCH = "python -c 'import torch'"
IMPORTS = "python -c 'import torch, lightning.pytorch, hydra'"
RUN = "python train.py"
JOBS = 8
TUTORIAL = "experiment=tutorial/random_dataset trainer.strategy=ddp trainer.devices=2"
SWEEP = f"python train.py -m {TUTORIAL} 'seed=range({JOBS})'"
JOB = "torchrun --nproc-per-node=2 by_hand.py random_dataset --into ."
AT_ONCE = "python train.py -m seed=1,2 trainer.max_epochs=1600 launch.threads=1"
"""Two jobs of about a minute, in one thread each."""


@dataclass(frozen=True)
class Row:
    """One thing beside another, as measured in alternation."""

    what: str
    against: str
    ours: list[float]
    theirs: list[float]
    unit: str
    """Of `ours` and `theirs`; less is better."""
    value: float
    """What the target is about: a ratio, or `unit`s."""
    target: float | None = None
    at_least: bool = False
    """Whether the value must reach its target, or stay below it."""

    @property
    def met(self) -> bool | None:
        """With the value as the table shows it."""
        if self.target is None:
            return None
        shown = round(self.value, 2)
        return shown >= self.target if self.at_least else shown <= self.target


def measure(clock: Clock, runs: int, directory: Path) -> Iterator[Row]:
    yield from steps(runs)
    for network in ("resnet18", "transformer"):
        yield from ddp(network, runs, directory)
    for command in (HYDRA, HELP, IMPORTS):  # once untimed: bytecode and libraries off the disk
        clock(command)
    yield from before_torch(clock, runs)
    yield from default_run(clock, runs, directory)
    yield sweep(clock)
    yield parent_memory(directory)
    yield two_at_once(clock)


def steps(runs: int) -> Iterator[Row]:
    """Training steps beside the same loops by hand, in one process and one thread."""
    alone = "a step of Linear(10, 1), batch 32"
    taken = steps_of("linear", runs)
    ours = taken["lockstep"]
    for loop, target in (("DataLoader", 0.55), ("index tensors", 0.25)):
        against = f"the loop by hand over {'a ' if loop == 'DataLoader' else ''}{loop}"
        yield speed(alone, against, ours, taken[loop], target)
    for network, name in (("resnet18", "ResNet-18"), ("transformer", "the transformer")):
        taken = steps_of(network, 2 * runs)  # a difference of 1 % is looked for
        what = f"a step of {name}"
        yield speed(what, "the loop by hand", taken["lockstep"], taken["by hand"], 0.99)
        ours, dp = taken["lockstep"], taken["dp"]
        yield speed(f"{what}, dp on 2 devices", "one device", dp, ours, 0.95)


def steps_of(network: str, rounds: int) -> dict[str, list[float]]:
    """Seconds a step of each way, see `benchmarks.steps`."""
    command = [sys.executable, "-m", "benchmarks.steps", network, "--rounds", str(rounds)]
    printed = completed(command, PROJECT, threads=1)
    taken: dict[str, list[float]] = json.loads(printed.splitlines()[-1])
    return taken


def speed(what: str, against: str, ours: list[float], theirs: list[float], target: float) -> Row:
    """Our steps per second over theirs; shown are milliseconds."""
    mine, other = ([1000 * seconds for seconds in taken] for taken in (ours, theirs))
    return Row(what, against, mine, other, "ms", ratio(theirs, ours), target, at_least=True)


def ddp(network: str, runs: int, directory: Path) -> Iterator[Row]:
    """Two processes of one thread each, beside the documents' script under torchrun."""
    pairs = [ddp_beside(network, directory / f"{network}{number}") for number in range(runs)]
    ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    what, against = f"{network}: ddp, 2 processes", "the documents' script under torchrun"

    def column(name: str, scale: float = 1.0) -> tuple[list[float], list[float]]:
        return [scale * side[name] for side in ours], [scale * side[name] for side in theirs]

    mine, other = column("step_s")
    yield speed(f"{what}, a step", against, mine, other, 0.99)
    mine, other = column("first_step_s")
    yield Row(f"{what}, to the first step", against, mine, other, "s", ratio(mine, other), 1.0)
    mine, other = column("peak_memory_bytes", 1 / MB)
    yield Row(
        f"{what}, peak memory of a rank", against, mine, other, "MB", ratio(mine, other), 1.05
    )


def before_torch(clock: Clock, runs: int) -> Iterator[Row]:
    """What a person waits for without any training: help, a config, and a typo's error."""
    commands = (HELP, CONFIG, TYPO)
    base, *columns = alternate(clock, [HYDRA, *commands], runs)
    for command, taken in zip(commands, columns, strict=True):
        yield Row(command, HYDRA, taken, base, "s", median(taken), 0.5)


def default_run(clock: Clock, runs: int, directory: Path) -> Iterator[Row]:
    """A whole run beside the imports that no run can do without."""
    base, taken, first = [], [], []
    for number in range(runs):
        base.append(clock(IMPORTS))
        taken.append(clock(RUN))
        first.append(first_step_s(directory / f"first{number}"))
    yield Row(f"{RUN}, to the first step", IMPORTS, first, base, "s", ratio(first, base), 1.15)
    yield Row(f"{RUN}, in all", IMPORTS, taken, base, "s", ratio(taken, base))


def sweep(clock: Clock) -> Row:
    """One sweep between two launches by hand, whose median stands for each of ``JOBS`` such."""
    first, whole, last = (clock(command) for command in (JOB, SWEEP, JOB))
    separate = JOBS * median([first, last])
    share = whole / separate
    return Row(SWEEP, f"{JOBS} x {JOB}", [whole], [separate], "s", share, 0.2)


def parent_memory(directory: Path) -> Row:
    ours, theirs = memory_while_running(directory / "parent")
    what = "memory of the launching process while ddp ranks train"
    return Row(what, TORCH, [ours / MB], [theirs / MB], "MB", ours / theirs, 1.1)


def two_at_once(clock: Clock) -> Row:
    """Over two slots, beside one after the other: the target is 1.7 times as fast."""
    over_slots = f"{AT_ONCE} hydra/launcher=slots hydra.launcher.slots=2"
    after, at_once = clock(AT_ONCE), clock(over_slots)
    return Row(over_slots, AT_ONCE, [at_once], [after], "s", at_once / after, 0.59)


def ratio(taken: list[float], base: list[float]) -> float:
    """Median over the rounds of a round's own ratio."""
    return median(mine / other for mine, other in zip(taken, base, strict=True))
