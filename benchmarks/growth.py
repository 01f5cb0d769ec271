"""``python -m benchmarks.growth``: how cost grows, with what; each a small plot.

Five sweeps of one size at a time: parameters, samples, processes, jobs, logged keys. Prints every
number, and draws all of them into ``benchmarks/results/growth.png``. About six minutes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from benchmarks.by_hand import median_step_s, over_indices, train
from benchmarks.many_jobs import TRIVIAL
from benchmarks.ours import outcome_of, step_s
from benchmarks.timing import PROJECT, results_file, seconds

from lockstep.data.tensors import Tensors
from lockstep.models.mlp import MLP
from lockstep.module import SupervisedModule

ROUNDS = 3
SMALL = ("data=bench_numbers", "data.datasets.samples=32000", "model=linear")


@dataclass(frozen=True)
class Growth:
    """One cost over one size."""

    size: str
    cost: str
    sizes: list[int]
    lines: dict[str, list[float]]


class Talkative(SupervisedModule):
    """Logs ``keys`` values in every step, as some people do."""

    def __init__(self, *, keys: int, **parts: Any) -> None:
        super().__init__(**parts)
        self.keys = keys

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        for number in range(self.keys):
            self.log(f"train/value{number}", loss.detach())
        return loss


def main() -> None:
    torch.set_num_threads(1)
    found = []
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as scratch:
        for grow in (parameters, samples, processes, jobs, logged_keys):
            growth = grow(Path(scratch) / grow.__name__)
            for name, costs in growth.lines.items():
                pairs = zip(growth.sizes, costs, strict=True)
                numbers = ", ".join(f"{size:,}: {cost:.3g}" for size, cost in pairs)
                print(f"{growth.cost}, {name}, over {growth.size}: {numbers}", flush=True)
            found.append(growth)
    print(f"drawn in {draw(found).relative_to(PROJECT)}")


def step_ms(overrides: Sequence[str], directory: Path) -> float:
    """Of a median step, the median of some rounds."""
    taken = []
    for number in range(ROUNDS):
        outcome = outcome_of(overrides, directory / str(number))
        taken.append(step_s(outcome))
    return 1000 * median(taken)


def parameters(directory: Path) -> Growth:
    """A step of an MLP with two hidden layers, beside the same step by hand."""
    widths = [16, 64, 256, 1024, 2048]
    data = Tensors(torch.randn(32 * 200, 10), torch.randn(32 * 200, 1)).tensors
    ours, by_hand, sizes = [], [], []
    for width in widths:
        chosen = ("model=mlp", f"model.network.width={width}", "data.datasets.samples=6400")
        ours.append(step_ms(("data=bench_numbers", *chosen), directory / str(width)))
        network = MLP(10, 1, width)
        sizes.append(sum(item.numel() for item in network.parameters()))
        stamps = [train(network, nn.MSELoss(), over_indices(data, 32)) for _ in range(ROUNDS)]
        by_hand.append(1000 * median(map(median_step_s, stamps)))
    return Growth("parameters", "ms a step", sizes, {"lockstep": ours, "by hand": by_hand})


def samples(directory: Path) -> Growth:
    """What an epoch costs beside its steps: drawing the order, fetching, the loss, a checkpoint."""
    sizes = [2**10, 2**13, 2**16, 2**19, 2**22]
    costs = []
    for size in sizes:
        chosen = ("data=bench_numbers", "model=linear", f"data.datasets.samples={size}")
        batch = f"data.global_batch_size={max(32, size // 1024)}"
        taken = [
            outcome_of((*chosen, batch), directory / f"{size}-{number}") for number in range(ROUNDS)
        ]
        costs.append(max(0.0, median(map(beside_steps_s, taken))))
    return Growth("samples", "s an epoch beside its steps", sizes, {"lockstep": costs})


def beside_steps_s(outcome: dict[str, Any]) -> float:
    return float(outcome["fit_s"] - outcome["steps"] * step_s(outcome))


def processes(directory: Path) -> Growth:
    """A ddp step of Linear(10, 1); four processes share two cores where there are only two."""
    counts = [1, 2, 4]
    steps, memory = [], []
    for count in counts:
        run = directory / str(count)
        run.parent.mkdir(exist_ok=True)
        chosen = "model=linear data.datasets.train=25600 trainer.max_epochs=1 test=false"
        where = f"trainer.strategy=ddp trainer.devices={count} trainer.accelerator=cpu"
        command = f"python train.py {chosen} {where} hydra.run.dir={run}"
        seconds(command, directory)
        result = json.loads((run / "result.json").read_text())
        steps.append(1000 * step_s(result))
        memory.append(sum(result["peak_memory_bytes"]) / 2**30)
    lines = {"ms a step": steps, "GB of all ranks": memory}
    return Growth("processes", "a ddp run", counts, lines)


def jobs(directory: Path) -> Growth:
    """A sweep of trivial jobs, from the command to its last line."""
    directory.mkdir()
    counts = [1, 2, 4, 8, 16]
    taken = [
        seconds(f"python train.py -m 'seed=range({count})' {TRIVIAL}", directory)
        for count in counts
    ]
    return Growth("jobs", "s a sweep", counts, {"lockstep": taken})


def logged_keys(directory: Path) -> Growth:
    """A step that logs values by ``self.log``; lockstep's own module logs none."""
    counts = [0, 1, 4, 16]
    costs = []
    for keys in counts:
        talking = ("model._target_=benchmarks.growth.Talkative", f"+model.keys={keys}")
        costs.append(step_ms((*SMALL, *talking), directory / str(keys)))
    return Growth("logged keys", "ms a step", counts, {"lockstep": costs})


def draw(found: list[Growth]) -> Path:
    figure = Figure(figsize=(12, 6), layout="constrained")
    for axes, growth in zip(figure.subplots(2, 3).flat, found, strict=False):
        for name, costs in growth.lines.items():
            axes.plot(growth.sizes, costs, "o-", label=name)
        axes.set_xlabel(growth.size)
        axes.set_ylabel(growth.cost)
        if growth.sizes[-1] > 1000:
            axes.set_xscale("log")
        else:
            axes.set_xticks(growth.sizes)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if len(growth.lines) > 1:
            axes.legend()
    figure.axes[-1].set_axis_off()
    path = results_file("growth.png")
    figure.savefig(path, dpi=110)
    return path


if __name__ == "__main__":
    main()
