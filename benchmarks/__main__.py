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

from benchmarks.plots import draw
from benchmarks.rows import Row, measure
from benchmarks.timing import PROJECT, clock_in, results_file


def main() -> None:
    runs = parse().runs
    facts = machine()  # the load before these benchmarks add theirs
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(machine_line(facts))
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as scratch:
        clock = clock_in(Path(scratch), lambda line: console.print(line, markup=False))
        rows = list(measure(clock, runs, Path(scratch)))
    console.print(table(rows))
    for path in (written := write(facts, rows, runs)), draw(rows, written.with_suffix(".png")):
        console.print(f"written to {path.relative_to(PROJECT)}")


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
    """Medians of both sides with their spread, and the value beside its target."""
    drawn = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("what", "against"):
        drawn.add_column(heading, overflow="fold", ratio=1)
    for heading in ("ours", "theirs", "value", "target", "met"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        drawn.add_row(row.what, row.against, *cells(row))
    return drawn


def cells(row: Row) -> list[str]:
    sides = [f"{middle_and_ends(taken)} {row.unit}" for taken in (row.ours, row.theirs)]
    sign = ">=" if row.at_least else "<="
    target = "" if row.target is None else f"{sign} {row.target:g}"
    met = {None: "", True: "yes", False: "no"}[row.met]
    return [*sides, f"{row.value:.2f}", target, met]


def middle_and_ends(taken: list[float]) -> str:
    """``1.02 (1.00 to 1.07)``: the median, the least and the most."""
    middle = f"{median(taken):.3g}"
    return middle if len(taken) == 1 else f"{middle} ({min(taken):.3g} to {max(taken):.3g})"


def write(facts: dict[str, Any], rows: list[Row], runs: int) -> Path:
    path = results_file(time.strftime("%Y-%m-%d_%H-%M-%S.json"))
    kept = {"machine": facts, "runs": runs, "rows": [asdict(r) | {"met": r.met} for r in rows]}
    path.write_text(json.dumps(kept, indent=2) + "\n")
    return path


if __name__ == "__main__":
    main()
