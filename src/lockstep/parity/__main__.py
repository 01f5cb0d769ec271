"""``python -m lockstep.parity [key=value ...]``: one config, compared place by place."""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
import time
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli import readable_errors
from lockstep.errors import RunFailed, UsageError, did_you_mean
from lockstep.parity.trial import Trial
from lockstep.placement import STRATEGIES

if TYPE_CHECKING:
    from lockstep.parity.differences import Judge

ABOUT = """Is a config's result the same on every strategy and device count? Trains what train.py
with the same overrides would on one device, again on one device, and everywhere else; then prints
how far each is from the first, and the likely reason where it differs."""
MORE = """Short by default: the first 20 steps of training, then validation and test as configured;
a wrong batch, mean or gradient shows in the first steps. Loss is that of each step, over the global
batch. Differences are relative to the largest value of their kind on one device. It computes in
float64, where sums in another order differ by 1e-13 and not, as with Adam in float32, by 1e-3; with
trainer.precision=... as you say. docs/guarantees.md names what depends on the split. Exit status: 0
all the same, 1 not or an error, 2 a wrong option."""
NO_REFERENCE = """that was the run on one device. --keep DIR leaves its traceback in train.log;
trainer.precision=32-true is for what cannot be computed in float64."""
HEADER = ("strategy", "devices", "loss", "weights", "metrics", "verdict", "likely reason")
Cells = tuple[str, ...]
"""One line of the table, in the order of `HEADER`."""


def main(arguments: list[str] | None = None) -> int:
    """Compare and print the table; returns the exit status."""
    options = parse(arguments)
    with scratch(options.keep) as root:
        rows = list(compare(Trial(options.overrides, options.steps, root), options))
    print("\n".join(table(rows)))
    same = sum(cells[5] == "same" for cells in rows)
    print(f"{same} of {len(rows)} runs are the same as one device, to {options.tolerance:g}")
    return 0 if same == len(rows) else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m lockstep.parity", None, ABOUT, MORE)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="as for train.py")
    add("--strategies", type=strategies, default="dp,ddp,ddp_spawn", help="%(default)s")
    add("--devices", type=counts, default="1,2", metavar="COUNTS", help="%(default)s")
    add("--steps", type=count, default="20", help="optimizer steps, at most: %(default)s")
    add("--tolerance", type=tolerance, default="1e-6", help="still the same: %(default)s")
    add("--keep", type=Path, metavar="DIR", help="leave the runs there, with their train.log")
    return parser.parse_intermixed_args(arguments)


def strategies(text: str) -> list[str]:
    for name in text.split(","):
        if name not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            near = did_you_mean(name, STRATEGIES)
            raise ArgumentTypeError(f"must be names of {known}; got {name!r}.{near}")
    return list(dict.fromkeys(text.split(",")))


def counts(text: str) -> list[int]:
    return [count(number) for number in dict.fromkeys(text.split(","))]


def count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise ArgumentTypeError(f"must be whole numbers from 1; got {text!r}. Use for example 2.")
    return int(text)


def tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"must be a number from 0; got {text!r}. Use for example 1e-6.")
    return value


@contextmanager
def scratch(keep: Path | None) -> Iterator[Path]:
    """Where the runs are written: ``keep``, or a directory that goes when they are done."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="lockstep-parity-") as directory:
            yield Path(directory)
        return
    if keep.exists() and not (keep.is_dir() and not any(keep.iterdir())):
        raise UsageError(f"--keep must be a new or empty directory; {keep} is not. Use another.")
    yield keep.resolve()


def compare(trial: Trial, options: argparse.Namespace) -> Iterator[Cells]:
    """The rows of the table. Raises `UsageError` or `RunFailed` without a run to compare with."""
    from lockstep.parity.differences import Judge, read_record

    started = time.monotonic()
    try:
        reference = read_record(trial.run("one device", "auto", 1))
    except RunFailed as error:
        raise RunFailed(f"{error}\nNothing to compare with: {NO_REFERENCE}") from error
    say(f"one device: what the others are compared with ({time.monotonic() - started:.1f} s)")
    judge = Judge(reference, options.tolerance, repeats=False)
    again = tried(trial, judge, "auto", 1, "one device again")
    yield again
    judge = Judge(reference, options.tolerance, repeats=again[5] != "differs")
    for strategy in options.strategies:
        for devices in options.devices:
            yield tried(trial, judge, strategy, devices, strategy)


def tried(trial: Trial, judge: Judge, strategy: str, devices: int, name: str) -> Cells:
    """Run there, and compare; an error is a row like another."""
    from lockstep.parity.differences import read_record

    started = time.monotonic()
    try:
        found = judge(read_record(trial.run(name, strategy, devices)), devices)
    except (UsageError, RunFailed) as error:
        found = ("-", "-", "-", "failed", str(error).partition("\n")[0])
    say(f"{name}, {devices}: {found[3]} ({time.monotonic() - started:.1f} s)")
    return (name, str(devices), *found)


def table(rows: list[Cells]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in (HEADER, *rows)
    ]


def say(line: str) -> None:
    """What is going on: beside the table, which may be piped elsewhere."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    with readable_errors(settings=False):
        sys.exit(main())
