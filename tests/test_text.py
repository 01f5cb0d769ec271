"""Text: padding changes nothing, the mean over tokens, and the promise of the core for them."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import Launch, on
from left import assert_weights_equal, checkpoint, weights

from lockstep.errors import UsageError
from lockstep.workloads.text.network import ByteTransformer, TextClassifier
from lockstep.workloads.text.objective import BitsPerByte
from lockstep.workloads.text.pieces import IGNORED, PADDING

SMALL = [
    "experiment=text/language_model",
    "trainer.accelerator=cpu",
    "trainer.max_epochs=1",
    "data.datasets.train_bytes=3000",
    "data.datasets.val_bytes=900",
    "data.datasets.test_bytes=901",
    "data.datasets.cut=definitions",
    "data.global_batch_size=8",
    "data.eval_batch_size=8",
    "model.network.context=32",
    "model.network.width=16",
    "model.network.heads=2",
    "model.network.depth=1",
    "scheduler.warmup_steps=3",
]
"""Pieces of 1 to 32 bytes: in a batch of 8, two ranks hold unequal numbers of bytes."""
SGD = ["optimizer=sgd", "optimizer.lr=0.5"]
"""Adam divides by the root of a mean square, which lifts roundings to the size of a step."""


# Networks


@pytest.mark.parametrize("depth", [0, 2])
def test_padding_changes_no_class_scores(depth: int) -> None:
    torch.manual_seed(0)
    network = TextClassifier(50, 3, width=8, depth=depth, heads=2).double()
    words = torch.randint(1, 50, (2, 5))
    padded = torch.cat([words, torch.full((2, 4), PADDING)], 1)
    torch.testing.assert_close(network(padded), network(words), rtol=1e-12, atol=1e-12)


def test_no_byte_depends_on_what_follows_it() -> None:
    torch.manual_seed(0)
    network = ByteTransformer(context=8, width=8, depth=2, heads=2).double()
    text = torch.randint(0, 256, (2, 8))
    other = text.clone()
    other[:, 5:] = 7
    before, after = network(text), network(other)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-12)
    assert (before[:, 5:] - after[:, 5:]).abs().max() > 1e-3
    torch.testing.assert_close(network(text[:, :3]), before[:, :3], rtol=0, atol=1e-12)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match=r"got 10 and 4\. Use 8 or 12"):
        ByteTransformer(8, width=10, depth=1, heads=4)
    with pytest.raises(UsageError, match=r"context=8; got 9 bytes"):
        ByteTransformer(8, width=8, depth=1, heads=4)(torch.zeros(1, 9, dtype=torch.long))


def test_bits_per_byte_is_the_mean_over_unpadded_bytes_of_all_batches() -> None:
    metric = BitsPerByte()
    scores, targets = torch.randn(3, 4, 256), torch.randint(0, 256, (3, 4))
    targets[1, 2:] = IGNORED
    metric.update(scores[:2], targets[:2])
    metric.update(scores[2:, :1], targets[2:, :1])
    metric.update(scores[:0], targets[:0])
    held = [(0, t) for t in range(4)] + [(1, 0), (1, 1), (2, 0)]
    bits = [-scores[b, t].log_softmax(0)[targets[b, t]].item() / math.log(2) for b, t in held]
    assert metric.compute().item() == pytest.approx(sum(bits) / 7, rel=1e-6)


# Runs


@pytest.mark.processes
@pytest.mark.parametrize(
    ("precision", "accumulate", "tolerance"),
    [("32-true", 1, 1e-5), ("64-true", 2, 1e-12)],
)
def test_two_processes_with_unequal_bytes_train_to_the_weights_of_one(
    launch: Launch, precision: str, accumulate: int, tolerance: float
) -> None:
    overrides = [
        *SMALL,
        *SGD,
        f"trainer.precision={precision}",
        f"trainer.accumulate_grad_batches={accumulate}",
    ]
    single, spread = launch(*overrides), launch(*overrides, *on("ddp", 2))
    assert single["steps"] == spread["steps"] > 5
    assert single["samples_seen"] == spread["samples_seen"] == BYTES
    assert_weights_equal(weights(spread["directory"]), weights(single["directory"]), tolerance)
    for name, value in single["metrics"].items():
        assert spread["metrics"][name] == pytest.approx(value, rel=tolerance), name
    # The schedule has counted optimizer steps, whatever is accumulated.
    (scheduler,) = checkpoint(spread["directory"])["lr_schedulers"]
    assert scheduler["last_epoch"] == spread["steps"]
    assert scheduler["_last_lr"] == pytest.approx([0], abs=1e-12)


BYTES = {"train": 2999, "val": 899, "test": 900}


@pytest.mark.processes
def test_a_rank_without_a_share_counts_no_byte(launch: Launch) -> None:
    """Three ranks: the last batch of training holds two samples, validation one."""
    overrides = [
        *SMALL,
        *SGD,
        "trainer.precision=64-true",
        "data.datasets.cut=windows",
        "data.datasets.train_bytes=257",  # 8 windows of 32
        "data.datasets.val_bytes=20",
        "data.global_batch_size=6",
        "scheduler.warmup_steps=1",
    ]
    single, spread = launch(*overrides), launch(*overrides, *on("ddp", 3))
    assert spread["samples_seen"] == {"train": 256, "val": 19, "test": 900}
    assert_weights_equal(weights(spread["directory"]), weights(single["directory"]), 1e-12)
    for name, value in single["metrics"].items():
        assert spread["metrics"][name] == pytest.approx(value, rel=1e-12), name


def test_predictions_are_the_bits_of_each_sample_and_sum_to_the_metric(launch: Launch) -> None:
    overrides = [*SMALL, "predict=true", "trainer.max_epochs=1"]
    single, spread = launch(*overrides), launch(*overrides, *on("dp", 2))
    rows = torch.load(single["predictions"], weights_only=True)
    assert int(rows["tokens"].sum()) == BYTES["test"]
    per_byte = (rows["bits"].double().sum() / BYTES["test"]).item()
    assert per_byte == pytest.approx(single["metrics"]["test/bits_per_byte"], rel=1e-5)
    assert single["metrics"]["test/loss"] == pytest.approx(per_byte * math.log(2), rel=1e-5)
    other = torch.load(spread["predictions"], weights_only=True)
    torch.testing.assert_close(other["bits"], rows["bits"], rtol=1e-3, atol=1e-3)


# The experiments at their defaults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "metric", "least", "most"),
    [
        ("language_model", "test/bits_per_byte", 1.5, 2.9),
        ("classification", "test/accuracy", 0.6, 1.0),
    ],
)
def test_an_experiment_reaches_its_score(
    launch: Launch, experiment: str, metric: str, least: float, most: float
) -> None:
    """Wide, for the sources of another Python: guessing is 8 bits, and one of six classes."""
    result = launch(f"experiment=text/{experiment}", "trainer.accelerator=cpu", "launch.threads=2")
    assert least < result["metrics"][metric] < most


SHORTENED = [
    "trainer.max_epochs=1",
    "scheduler.warmup_steps=3",
    "data.datasets.train_bytes=40000",
    "data.datasets.val_bytes=9001",
    "data.datasets.test_bytes=9001",
]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("strategy", "devices"), [("dp", 2), ("ddp", 2), ("ddp_spawn", 2)])
@pytest.mark.parametrize(
    ("experiment", "short"),
    [
        ("language_model", []),
        ("language_model", ["data.datasets.cut=definitions"]),
        ("classification", ["trainer.max_epochs=2"]),
    ],
    ids=["windows", "definitions", "classification"],
)
def test_an_experiment_is_the_same_on_two_devices(
    launch: Launch, experiment: str, short: list[str], strategy: str, devices: int
) -> None:
    """The defaults' networks and Adam, shortened, in float64: in float32 Adam turns roundings into
    1e-3 of a weight within some steps, on one device as soon as a sum's order differs."""
    overrides = [
        f"experiment=text/{experiment}",
        "trainer.accelerator=cpu",
        "trainer.precision=64-true",
        "trainer.log_every_n_steps=1",
        *(SHORTENED if experiment == "language_model" else []),
        *short,
    ]
    single, spread = launch(*overrides), launch(*overrides, *on(strategy, devices))
    assert single["steps"] == spread["steps"] > 15
    assert single["samples_seen"] == spread["samples_seen"]
    assert_weights_equal(weights(spread["directory"]), weights(single["directory"]), 1e-9)
    for name, value in single["metrics"].items():
        assert spread["metrics"][name] == pytest.approx(value, rel=1e-6), name
