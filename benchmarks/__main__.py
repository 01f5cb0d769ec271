"""``python -m benchmarks [--runs N]``: print the table, keep it in ``benchmarks/results/``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.rows import Row, measure
from benchmarks.timing import PROJECT, clock_in


def main() -> None:
    runs = parse().runs
    facts = machine()  # the load before these benchmarks add theirs
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(machine_line(facts))
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as scratch:
        clock = clock_in(Path(scratch), lambda line: console.print(line, markup=False))
        rows = list(measure(clock, runs, Path(scratch)))
    console.print(table(rows))
    console.print(f"written to {write(facts, rows, runs).relative_to(PROJECT)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--runs", type=int, default=3, help="rounds of each comparison but the sweep's (default 3)"
    )
    given = parser.parse_args()
    if given.runs < 1:
        parser.error(f"--runs must be 1 or greater; got {given.runs}.")
    return given


def machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else "unknown",
        **{name: version(name) for name in ("torch", "lightning", "hydra-core")},
    }


def machine_line(facts: dict[str, Any]) -> str:
    return ", ".join(
        str(value) if name == "system" else f"{name} {value}" for name, value in facts.items()
    )


def table(rows: list[Row]) -> Table:
    """Median seconds of both commands, their ratio, and the value beside its target."""
    drawn = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("command", "against"):
        drawn.add_column(heading, overflow="fold", ratio=1)
    for heading in ("s", "s against", "ratio", "target", "met"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        drawn.add_row(row.command, row.baseline, *cells(row))
    return drawn


def cells(row: Row) -> list[str]:
    times = [f"{median(taken):.2f}" for taken in (row.seconds, row.baseline_seconds)]
    target = "" if row.target is None else f"{row.target:g} {row.unit}"
    met = {None: "", True: "yes", False: "no"}[row.met]
    return [*times, f"{row.ratio:.2f}", target, met]


def write(facts: dict[str, Any], rows: list[Row], runs: int) -> Path:
    path = PROJECT / "benchmarks" / "results" / time.strftime("%Y-%m-%d_%H-%M-%S.json")
    kept = {"machine": facts, "runs": runs, "rows": [asdict(r) | {"met": r.met} for r in rows]}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(kept, indent=2) + "\n")
    return path


if __name__ == "__main__":
    main()
