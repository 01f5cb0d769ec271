"""What follows from the seed, and what must differ between ranks and epochs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DDP2, SMALL, Launch, on, quick_and_slow
from left import assert_weights_equal, weights

from lockstep.errors import UsageError
from lockstep.sizes import scaled_optimizer

pytestmark = pytest.mark.processes
DRAW = [
    "data=drawing",
    "model=linear",
    "model.network.out_features=3",
    "optimizer=sgd",
    "callbacks=drawing",
    "trainer.max_epochs=2",
    "objective=train/loss",
]


def drawn(directory: str | Path) -> dict[tuple[int, int, int], dict[str, Any]]:
    """(rank, epoch, batch) -> what was drawn there."""
    return {
        (int(path.stem.rpartition("-")[2]), row["epoch"], row["batch"]): row
        for path in sorted(Path(directory).glob("drawn-*.jsonl"))
        for row in map(json.loads, path.read_text().splitlines())
    }


@pytest.mark.parametrize(
    ("strategy", "workers"),
    quick_and_slow(
        [(strategy, workers) for strategy in ("ddp", "ddp_spawn") for workers in (0, 2)],
        [("ddp", 0), ("ddp_spawn", 0)],
    ),
)
def test_draws_differ_between_ranks_and_epochs_and_repeat_with_the_seed(
    launch: Launch, strategy: str, workers: int
) -> None:
    where = [*on(strategy), f"data.num_workers={workers}"]
    first, again = (drawn(launch(*DRAW, *where)["directory"]) for _ in range(2))
    assert first == again, "the same seed repeats every draw"
    assert set(first) == {
        (rank, epoch, batch) for rank in (0, 1) for epoch in (0, 1) for batch in (0, 1)
    }
    data = [number for row in first.values() for sample in row["data"] for number in sample]
    # Two loader processes of a rank share Python's and NumPy's draws with nobody: all differ.
    assert len(set(data)) == len(data)
    steps = [row["step"] for row in first.values()]
    assert len(set(steps)) == len(steps)
    for epoch in (0, 1):
        for batch in (0, 1):
            assert first[0, epoch, batch]["weights"] == first[1, epoch, batch]["weights"]
    other = drawn(launch(*DRAW, *where, "seed=1")["directory"])
    assert other[0, 0, 0]["data"] != first[0, 0, 0]["data"]


def test_initial_weights_follow_from_the_seed_alone(launch: Launch) -> None:
    def start(*overrides: str) -> list[float]:
        result = launch(*DRAW, "optimizer.lr=0", *overrides)
        weights: list[float] = drawn(result["directory"])[0, 0, 0]["weights"]
        return weights

    single = start()
    assert start(*DDP2) == single
    assert start(*on("dp")) == single
    assert start("seed=1") != single


def test_a_drawn_seed_is_stored_and_another_each_time(launch: Launch) -> None:
    seeds = [launch(*SMALL, "seed=null")["seed"] for _ in range(2)]
    assert seeds[0] != seeds[1]
    assert all(isinstance(seed, int) for seed in seeds)
    repeated = [launch(*SMALL, f"seed={seeds[0]}")["metrics"] for _ in range(2)]
    assert repeated[0] == repeated[1]


@pytest.mark.parametrize(
    "strategy",
    quick_and_slow([("auto",), ("dp",), ("ddp",), ("ddp_spawn",)], [("auto",), ("ddp",)]),
)
def test_deterministic_repeats_bit_for_bit(launch: Launch, strategy: str) -> None:
    where = on(strategy, 1 if strategy == "auto" else 2)
    runs = [
        launch("trainer.deterministic=true", "trainer.max_epochs=2", *where)["directory"]
        for _ in range(2)
    ]
    torch.use_deterministic_algorithms(False)
    assert_weights_equal(weights(runs[1]), weights(runs[0]), tolerance=0)


@pytest.mark.parametrize(
    ("rule", "rate"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)], ids=lambda value: str(value)
)
def test_the_rate_scales_with_samples_per_step(rule: str, rate: float) -> None:
    optimizer = {"lr": 0.1, "scale_lr": rule, "reference_batch_size": 64}
    assert scaled_optimizer(optimizer, 256) == {"lr": pytest.approx(rate)}


def test_a_scaled_rate_is_used_and_shown_for_any_device_count(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    scale = [
        "optimizer.scale_lr=linear",
        "optimizer.reference_batch_size=4",
        "optimizer.lr=0.5e-6",
        "trainer.accumulate_grad_batches=2",
    ]
    for where in ([], DDP2):
        result = launch(*SMALL, *where, *scale)
        assert result["learning_rate"] == pytest.approx(2e-6)
        assert result["effective_batch_size"] == 16
    opening = [text for text in caplog.messages if "writing" in text]
    assert len(opening) == 2
    assert all("2 accumulated: 16 a step" in text and "lr 2e-06" in text for text in opening)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optimizer.scale_lr=cubic"], "must be one of none, linear, sqrt; got 'cubic'"),
        (["optimizer.scale_lr=linear"], "got optimizer.reference_batch_size=None"),
    ],
)
def test_a_scale_that_cannot_be_used_is_refused(
    launch: Launch, overrides: list[str], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        launch(*SMALL, *overrides)
