"""``python -m benchmarks.ways``: settings that might make steps faster, each beside the default.

Prints the ratio of steps per second, median of the rounds' own ratios; above 1 the setting is
faster. What is not a setting (see docs/performance.md) was measured when it was made. Six minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks.ours import TRAINING, outcome_of
from benchmarks.pairs import TRAIN, read, run

LINEAR = ("data=bench_numbers", "data.datasets.samples=64000", "model=linear")
DEEP = ("data=bench_texts", "data.datasets.samples=384", "model=bench_transformer")
BAR = ("+trainer.enable_progress_bar=true",)
HERE = {
    "bar on": (LINEAR, BAR),
    "metrics for the bar each step": (
        LINEAR,
        ("model._target_=benchmarks.growth.Talkative", "+model.keys=1"),
    ),
    "foreach SGD, small": (LINEAR, ("+optimizer.foreach=true",)),
    "fused SGD, small": (LINEAR, ("+optimizer.fused=true",)),
    "foreach SGD, transformer": (DEEP, ("+optimizer.foreach=true",)),
    "fused SGD, transformer": (DEEP, ("+optimizer.fused=true",)),
    "compile, transformer": (DEEP, ("compile=true",)),
    "one loader process, small": (LINEAR, ("data.num_workers=1",)),
    "one loader process, transformer": (DEEP, ("data.num_workers=1",)),
}
DDP = {
    "without gradient_as_bucket_view": ("strategy.options.gradient_as_bucket_view=false",),
    "static_graph": ("+strategy.options.static_graph=true",),
    "buckets of 1 MB": ("+strategy.options.bucket_cap_mb=1",),
    "buckets of 100 MB": ("+strategy.options.bucket_cap_mb=100",),
}
"""Under ddp on two processes, with the transformer."""
Speed = Callable[[Sequence[str], Path], float]


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.ways", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as scratch:
        for number, (name, (base, setting)) in enumerate(HERE.items()):
            told(name, base, setting, here, Path(scratch) / f"here{number}", rounds)
        for number, (name, setting) in enumerate(DDP.items()):
            told(f"ddp, {name}", DEEP, setting, over_ddp, Path(scratch) / f"ddp{number}", rounds)


def told(
    name: str, base: Sequence[str], setting: Sequence[str], speed: Speed, into: Path, rounds: int
) -> None:
    ratios = []
    for number in range(rounds):
        plain = speed(base, into / f"plain{number}")
        ratios.append(speed((*base, *setting), into / f"set{number}") / plain)
    print(json.dumps({"way": name, "ratio": round(median(ratios), 3)}), flush=True)


def here(overrides: Sequence[str], directory: Path) -> float:
    return float(outcome_of(overrides, directory)["samples_per_second"])


def over_ddp(overrides: Sequence[str], directory: Path) -> float:
    directory.mkdir(parents=True)
    where = ["strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu"]
    run([*TRAIN, *TRAINING, *where, *overrides, f"hydra.run.dir={directory}"], directory.parent)
    return float(read(directory / "result.json")["samples_per_second"])


if __name__ == "__main__":
    main()
