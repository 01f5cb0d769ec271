"""``python -m benchmarks.convergence``: what late and rare exchanges cost, and what they save.

Trains three workloads with ddp, ddp_async and local_sgd on hosts behind slow links, and prints the
test metric and the step time of each. The links' rates are such that a gradient takes longer than
the computing of a step; ``--megabits`` sets another. About two minutes; needs root on Linux.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from statistics import mean, quantiles
from typing import Any

from benchmarks.shaped import Measured, measure, missing
from benchmarks.timing import PROJECT, results_file


@dataclass(frozen=True)
class Workload:
    name: str
    overrides: tuple[str, ...]
    metric: str
    megabits: float


WORKLOADS = [
    Workload("teacher", (), "test/loss", 4),
    # only: image
    Workload("image/digits", ("experiment=image/digits",), "test/accuracy", 80),
    # end only
    # only: text
    Workload("text/classification", ("experiment=text/classification",), "test/accuracy", 200),
    # end only
]
STRATEGIES = {
    "ddp": ("strategy=ddp",),
    "ddp_async": ("strategy=ddp_async",),
    "local_sgd, k=8": ("strategy=local_sgd", "strategy.options.period=8"),
}


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.convergence", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="hosts (default 2)")
    parser.add_argument(
        "--workload", choices=[item.name for item in WORKLOADS], help="default: all"
    )
    parser.add_argument("--megabits", type=float, help="a second each way, of every link")
    parser.add_argument("overrides", nargs="*", help="of the runs: optimizer.lr=1e-4")
    ranks, only = (given := parser.parse_args()).ranks, given.workload
    if ranks < 2:
        parser.error(f"--ranks must be 2 or greater, for there to be links; got {ranks}.")
    if (why := missing()) is not None:
        parser.error(f"{why}.")
    print(f"{ranks} hosts; a step's mean, and its median with the middle half, in ms")
    rows = []
    for workload in (item for item in WORKLOADS if only in (None, item.name)):
        for name, chosen in STRATEGIES.items():
            rate = given.megabits or workload.megabits
            found = measure(ranks, rate, [*workload.overrides, *chosen, *given.overrides])
            rows.append(row(replace(workload, megabits=rate), name, found))
            print(line(rows[-1]), flush=True)
    path = results_file(f"convergence-{ranks}-{(only or 'all').replace('/', '-')}.json")
    path.write_text(json.dumps(rows, indent=2) + "\n")
    print(f"written to {path.relative_to(PROJECT)}")


def row(workload: Workload, strategy: str, found: Measured) -> dict[str, Any]:
    low, middle, high = quantiles(found.step_s, n=4)
    return {
        "workload": workload.name,
        "strategy": strategy,
        "megabits": workload.megabits,
        "metric": workload.metric,
        "value": found.outcome["metrics"][workload.metric],
        "mean_ms": 1000 * mean(found.step_s),
        "median_ms": 1000 * middle,
        "middle_half_ms": [1000 * low, 1000 * high],
        "most_ms": 1000 * max(found.step_s),
        "wire_bytes_per_step": found.wire_bytes_per_step,
    }


def line(row: dict[str, Any]) -> str:
    low, high = row["middle_half_ms"]
    steps = f"{row['mean_ms']:.0f}  {row['median_ms']:.0f} ({low:.0f} to {high:.0f})"
    what = f"{row['workload']:20} {row['megabits']:4g} Mbit/s  {row['strategy']:15}"
    moved = row["wire_bytes_per_step"] / 2000
    return f"{what} {row['metric']} {row['value']:.4f}  {steps} ms  {moved:.0f} kB each way"


if __name__ == "__main__":
    main()
