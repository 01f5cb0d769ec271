"""``python -m benchmarks.steps NETWORK``: steps by hand and with lockstep, in one thread.

Prints JSON: a list of seconds a step for each way. Blocks of a few steps alternate in one process,
so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks import networks
from benchmarks.by_hand import median_step_s, over_a_loader, over_indices, train
from benchmarks.ours import outcome_of, step_s

LINEAR = ("data=bench_numbers", "model=linear", "+trainer.enable_progress_bar=true")
LINEAR_STEPS = 4000
Way = Callable[[Path], float]
"""Runs one block below a directory; returns seconds a step."""


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.steps", description=__doc__)
    parser.add_argument("network", choices=WAYS)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(alternating(WAYS[options.network](), options.rounds)))


def alternating(ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as scratch:
        for number in range(rounds + 1):
            for name, way in ways.items():
                seconds = way(Path(scratch) / f"{name}{number}")
                if number:  # the first round warms up
                    taken[name].append(seconds)
    return taken


def linear() -> dict[str, Way]:
    """Whole epochs, everything in them: the loss logged, the bar drawn, the checkpoint saved."""
    data = networks.numbers(32 * LINEAR_STEPS)
    samples = f"data.datasets.samples={len(data[0])}"

    def by_hand(batches: Callable[..., object]) -> Way:
        def epoch(_: Path) -> float:
            stamps = train(nn.Linear(10, 1), nn.MSELoss(), batches(data, 32))
            return (stamps[-1] - stamps[0]) / LINEAR_STEPS

        return epoch

    def ours(directory: Path) -> float:
        outcome = outcome_of((*LINEAR, samples), directory)
        return float(outcome["fit_s"]) / int(outcome["steps"])

    return {
        "DataLoader": by_hand(over_a_loader),
        "index tensors": by_hand(over_indices),
        "lockstep": ours,
    }


def deep(make: Callable[[], nn.Module], data: networks.Pair, batch: int) -> Way:
    def block(_: Path) -> float:
        torch.manual_seed(0)
        return median_step_s(train(make(), nn.CrossEntropyLoss(), over_a_loader(data, batch)))

    return block


def ours(data: str, model: str, *overrides: str) -> Way:
    def block(directory: Path) -> float:
        outcome = outcome_of((f"data={data}", f"model={model}", *overrides), directory)
        return step_s(outcome)

    return block


def resnet18() -> dict[str, Way]:
    return beside("bench_images", "bench_resnet18", networks.resnet18, networks.images(64 * 12), 64)


def transformer() -> dict[str, Way]:
    texts = networks.texts(16 * 12)
    return beside("bench_texts", "bench_transformer", networks.Transformer, texts, 16)


def beside(
    data: str, model: str, make: Callable[[], nn.Module], tensors: networks.Pair, batch: int
) -> dict[str, Way]:
    dp = ("trainer.strategy=dp", "trainer.devices=2")
    return {
        "by hand": deep(make, tensors, batch),
        "lockstep": ours(data, model),
        "dp": ours(data, model, "trainer.accelerator=cpu", *dp),
    }


WAYS: dict[str, Callable[[], dict[str, Way]]] = {
    "linear": linear,
    "resnet18": resnet18,
    "transformer": transformer,
}

if __name__ == "__main__":
    main()
