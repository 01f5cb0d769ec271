"""What ``find=`` finds is what plain torch finds, on any strategy, and nothing is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Launch
from left import table
from recording import indexed
from test_features import RUN, STRATEGIES, TABLE, where
from torch import nn

from lockstep.data.sharding import epoch_order
from lockstep.errors import UsageError
from lockstep.find.curve import SKIPPED, rates, smoothed, steepest
from lockstep.models.mlp import MLP
from lockstep.randomness import seed_everything

SAMPLES, STEPS, BATCH, ACCUMULATED = 63, 24, 6, 2
LR = [
    *RUN,
    f"data.datasets.train={SAMPLES}",
    "data.shuffle=true",
    "find=lr",
    f"find.num_training={STEPS}",
    "find.max_lr=1",
    "scheduler=warmup",
]
LR += [f"data.global_batch_size={BATCH}", f"trainer.accumulate_grad_batches={ACCUMULATED}"]


def by_hand() -> list[float]:
    """The losses of the range test in plain torch; the last batch of an epoch has 3 samples."""
    seed_everything(0)
    network = MLP(10, 1, width=8)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    inputs, targets = indexed(SAMPLES, 1, 1).train.tensors
    windows = []
    for epoch in range(STEPS):
        batches = epoch_order(SAMPLES, 0, epoch, shuffle=True).split(BATCH)
        windows += [batches[i : i + ACCUMULATED] for i in range(0, len(batches), ACCUMULATED)]
    losses = []
    for step, rate in enumerate(rates(1e-6, 1, STEPS)):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        window = windows[step]
        parts = [nn.functional.mse_loss(network(inputs[rows]), targets[rows]) for rows in window]
        (sum(parts) / ACCUMULATED).backward()  # as Lightning has it
        optimizer.step()
        losses.append(sum(part.item() for part in parts) / len(window))
    return losses


OF_THE_TABLE = [pytest.param(name, id=name) for name in STRATEGIES]
OTHERS = [
    pytest.param(name, id=name, marks=pytest.mark.slow)
    for name in ("ddp_ps", "ddp_find_unused_parameters_true")
]


@pytest.mark.processes
@pytest.mark.parametrize("strategy", OF_THE_TABLE + OTHERS)
def test_the_rates_losses_and_suggestion_are_those_of_plain_torch(
    launch: Launch, strategy: str
) -> None:
    assert TABLE.get(("learning-rate finder", strategy), "same") == "same"
    result = launch(*LR, "trainer.accelerator=cpu", *where(strategy))
    directory = Path(result["directory"])
    rows = table(directory / "find_lr.csv")
    expected, curve = by_hand(), smoothed(by_hand())
    too_much = 4 * min(curve[SKIPPED:])
    assert len(rows) == next(i for i in range(SKIPPED, STEPS) if curve[i] > too_much) + 1 < STEPS
    expected = expected[: len(rows)]
    *losses, last = [float(row["loss"]) for row in rows]
    assert losses == pytest.approx(expected[:-1], rel=1e-6)
    assert last == pytest.approx(expected[-1], rel=1e-4), "what diverges multiplies its rounding"
    tried = rates(1e-6, 1, STEPS)
    assert [float(row["lr"]) for row in rows] == tried[: len(rows)]
    place = steepest(expected)
    assert place is not None
    assert result["metrics"]["find/lr"] == tried[place]
    left = {path.name for path in directory.iterdir()} - {".hydra", "train.log"}
    assert left == {"find_lr.csv", "find_lr.png", "result.json"}, "no checkpoint, no log"


def test_the_suggestion_is_where_a_known_curve_falls_steepest() -> None:
    tried = rates(1e-4, 1, 101)
    assert (tried[0], tried[50], tried[100]) == pytest.approx((1e-4, 1e-2, 1))
    # A step down at 50; the exponential mean falls most at the step itself.
    losses = [1.0] * 50 + [0.0] * 51
    assert smoothed(losses)[49] == pytest.approx(1)
    assert smoothed(losses)[50] == pytest.approx(0.9, abs=1e-3)
    assert steepest(losses) in (49, 50)
    assert steepest([float(step) for step in range(100)]) is None


@pytest.mark.processes
def test_the_suggestion_is_what_the_config_has_before_it_is_scaled(launch: Launch) -> None:
    scaled = ["optimizer.scale_lr=linear", "optimizer.reference_batch_size=6"]
    plain = launch(*LR)["metrics"]["find/lr"]
    assert launch(*LR, *scaled)["metrics"]["find/lr"] == pytest.approx(plain / 2, rel=1e-9)


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("find.min_lr=1", "must be greater than 0 and less than find.max_lr; got 1"),
        ("find.num_training=5", "at least 20 steps; got 5"),
        ("find.early_stop_threshold=0.5", "must be greater than 1, or null; got 0.5"),
        ("+find.stps=5", "find=lr: .*'stps'.*conf/find/lr.yaml"),
        ("find.name=rate", "must be one of lr, batch; got find.name=rate"),
        ("trainer.fast_dev_run=true", "Use trainer.fast_dev_run=false"),
        ("strategy=local_sgd", "got trainer.strategy=local_sgd. Use trainer.strategy=ddp"),
        ("strategy=deepspeed", "got trainer.strategy=deepspeed. Use trainer.strategy=ddp"),
        ("strategy=fsdp", "got trainer.strategy=fsdp. Use trainer.strategy=ddp"),
    ],
)
def test_what_cannot_be_found_is_said_before_anything_starts(
    launch: Launch, override: str, match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        launch(*LR, override)
