"""Text: who predicts which byte, that padding changes nothing, and the mean over tokens."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Launch, compose_config, on
from left import assert_weights_equal, checkpoint, weights

from lockstep.config import as_config
from lockstep.errors import UsageError
from lockstep.schedules import warmup
from lockstep.workloads.text import generate as command
from lockstep.workloads.text.data import (
    cuts_of,
    dealt,
    read_modules,
    stdlib_bytes,
    stdlib_topics,
)
from lockstep.workloads.text.network import ByteTransformer, TextClassifier
from lockstep.workloads.text.objective import BitsPerByte
from lockstep.workloads.text.pieces import IGNORED, PADDING, Continuations
from lockstep.workloads.text.sources import modules_of, split_of, top_level_modules

TOPICS = ["asyncio", "email", "importlib", "multiprocessing", "unittest", "xml"]
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


def every(dataset: Any) -> tuple[torch.Tensor, ...]:
    return dataset.__getitems__(range(len(dataset)))


# Data


@pytest.mark.parametrize("cut", ["windows", "definitions"])
def test_every_byte_after_the_first_is_predicted_once(cut: str) -> None:
    splits = stdlib_bytes(5000, 3000, 1000, context=50, cut=cut)
    for split, size in ((splits.train, 5000), (splits.val, 3000), (splits.test, 1000)):
        assert isinstance(split, Continuations)
        targets = every(split)[1]
        held = targets[targets != IGNORED]
        assert len(split.tokens) == size
        assert len(held) == size - 1
        # By position, not by value: starts and lengths cover the text without gap or overlap.
        order = split.starts.argsort()
        ends = (split.starts + split.lengths)[order]
        assert split.starts[order].tolist() == [0, *ends[:-1].tolist()]
        assert torch.equal(
            torch.bincount(held, minlength=256),
            torch.bincount(split.tokens[1:].int(), minlength=256),
        )


def test_targets_are_the_next_bytes() -> None:
    text = bytes(range(10, 20))
    data = Continuations(
        torch.tensor(list(text), dtype=torch.uint8), torch.tensor([0, 4]), torch.tensor([4, 2])
    )
    inputs, targets = every(data)
    assert inputs.tolist() == [[10, 11, 12, 13], [14, 15, PADDING, PADDING]]
    assert targets.tolist() == [[11, 12, 13, 14], [15, 16, IGNORED, IGNORED]]
    assert [column.tolist() for column in data[1]] == [[14, 15], [15, 16]]


def test_definitions_begin_with_their_decorators_and_fit_the_context() -> None:
    text = (
        b"import x\n\n@first\n@second(1)\ndef f():\n    pass\n\nclass A:\n    def g(self): pass\n\n"
    )
    cuts = cuts_of(text, 1000, "definitions").tolist()
    assert [text[a:b].split(b"\n")[0] for a, b in pairwise(cuts)] == [
        b"import x",
        b"@first",
        b"class A:",
        b"    def g(self): pass",
    ]
    assert cuts_of(text, 7, "definitions").diff().max() == 7


def test_no_file_is_in_two_splits_and_a_file_stays_where_others_go() -> None:
    read = read_modules({"train": 10**9, "val": 10**9, "test": 10**9})
    paths = [path for path, _ in read]
    assert len(set(paths)) == len(paths) == len(top_level_modules())
    sizes = {split: sum(split_of(path) == split for path in paths) for split in ("val", "test")}
    assert min(sizes.values()) >= 5
    assert len(paths) - sum(sizes.values()) > len(paths) / 2
    splits = {path.name: split_of(path) for path in paths}
    assert (splits["argparse.py"], splits["glob.py"]) == ("train", "val")
    for topic in TOPICS:
        files = modules_of(topic)
        dealt_files = [path for path, _ in dealt(files)]
        assert sorted(dealt_files) == files
        assert {split for _, split in dealt(files)} == {"train", "val", "test"}
        assert not any("test" in path.parts[-2:] for path in files)


def test_data_is_the_same_each_time_and_its_digest_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    first, second = (stdlib_topics(TOPICS, 512, 8, 64) for _ in range(2))
    for one, other in ((first.train, second.train), (first.test, second.test)):
        assert all(map(torch.equal, every(one), every(other)))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert "sha256" in lines[0]
    stdlib_topics(TOPICS[:-1], 512, 8, 64)
    assert caplog.records[-1].getMessage().split()[-1] != lines[0].split()[-1]


def test_evaluation_in_order_of_length_pads_less() -> None:
    def padded(data: Any, order: torch.Tensor) -> float:
        batches = [data.__getitems__(rows)[0] for rows in order.split(64)]
        held = int(data.lengths.sum())
        return 1 - held / sum(batch.numel() for batch in batches)

    test = stdlib_topics(TOPICS, 512, 8, 256).test
    assert test is not None
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randperm(len(test), generator=generator)
    assert padded(test, torch.arange(len(test))) < 0.2 < 0.5 < padded(test, drawn)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"cut": "lines"}, "windows or definitions; got lines"),
        ({"context": 0}, "context must be 1 or greater; got 0"),
        ({"val_bytes": 1}, "val_bytes must be 2 or more; got 1"),
    ],
)
def test_impossible_cuts_are_refused(values: dict[str, Any], words: str) -> None:
    usual: dict[str, Any] = {"train_bytes": 9, "val_bytes": 9, "test_bytes": 9, "context": 4}
    with pytest.raises(UsageError, match=words):
        stdlib_bytes(**(usual | values))


def test_topics_that_are_no_packages_are_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"got asynkio\..*has: .*asyncio, "):
        stdlib_topics(["asynkio"], 512, 8, 64)


def test_there_are_as_many_classes_as_topics(tmp_path: Path) -> None:
    composed = compose_config(["experiment=text/classification"], tmp_path)
    del composed["hydra"], composed["callbacks"], composed["logger"]
    config = as_config(composed)
    assert config.model["network"]["classes"] == len(config.data.datasets["topics"]) == len(TOPICS)


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


# The schedule


def test_the_rate_is_warmed_up_then_falls_to_zero_by_steps() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = warmup(optimizer, warmup_steps=3, total_steps=7)
    rates = []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    expected = [0.5, 1.0, 1.5, 2.0, 1 + math.cos(math.pi / 4), 1.0, 1 - math.cos(math.pi / 4), 0.0]
    assert rates == pytest.approx(expected, abs=1e-12)
    with pytest.raises(UsageError, match=r"got 7 of 7\. Use 0"):
        warmup(optimizer, warmup_steps=7, total_steps=7)


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


# The command


def test_a_run_continues_a_prompt(
    launch: Launch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = launch(*SMALL)["directory"]

    def answer(*arguments: str, source: str | Path = run) -> tuple[int, str, str]:
        capsys.readouterr()
        status = command.main([str(source), *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    status, greedy, remarks = answer("--temperature", "0", "--bytes", "20")
    assert (status, remarks) == (0, "")
    assert greedy.startswith("def ")
    network, _ = command.load_model(Path(run))
    added = command.generate(network, b"def ", 20, 0, 0)
    assert len(added) == 20
    # Greedy is what the network says is the likeliest, whatever the seed.
    scores = network(torch.tensor([list(b"def ")]))[0, -1]
    assert added[0] == int(scores.argmax())
    assert answer("--temperature", "0", "--bytes", "20", "--seed", "5")[1] == greedy
    drawn = [command.generate(network, b"def ", 60, 0.8, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert "has 40 bytes: the model sees the last 32" in answer("--prompt", "y" * 40)[2]
    assert "is empty: starting at the beginning of a line" in answer("--prompt", "")[2]
    assert command.generate(network, b"", 5, 0, 0) == command.generate(network, b"\n", 5, 0, 0)
    status, text, remarks = answer("--prompt", "a\x01")
    assert (status, text[:2]) == (0, "a\x01")
    assert r"has never seen b'\x01' in training" in remarks
    # What cannot be done.
    status, text, problem = answer("--bytes", "0")
    assert (status, text) == (1, "")
    assert "--bytes must be 1 or greater" in problem
    status, _, problem = answer("--temperature", "-1")
    assert status == 1
    assert "got 200 and -1.0" in problem
    status, _, problem = answer(source=tmp_path / "nothing")
    assert status == 1
    assert "nothing is none" in problem
    torn = Path(run) / "checkpoints/torn.ckpt"
    torn.write_bytes(b"no checkpoint")
    status, _, problem = answer(source=torn)
    assert status == 1
    assert "torn.ckpt must be a checkpoint" in problem


def test_only_the_last_bytes_of_a_prompt_count() -> None:
    torch.manual_seed(0)
    network = ByteTransformer(context=8, width=16, depth=1, heads=2).eval()
    for weight in network.parameters():
        torch.nn.init.normal_(weight)
    long, other = b"one two three", b"ein two three"
    assert long[-8:] == other[-8:]
    added = command.generate(network, long, 20, 0.8, 0)
    assert command.generate(network, other, 20, 0.8, 0) == added
    assert command.generate(network, long[:-1], 20, 0.8, 0) != added


def test_a_checkpoint_of_another_model_names_the_first_keys_that_differ(launch: Launch) -> None:
    run = Path(launch(*SMALL)["directory"])
    wider = Path(launch(*SMALL, "model.network.width=32")["directory"])
    (run / "checkpoints/other.ckpt").write_bytes((wider / "checkpoints/last.ckpt").read_bytes())
    with pytest.raises(
        UsageError, match=r"bytes\.weight is \(256, 32\), of the network \(256, 16\)"
    ):
        command.load_model(run / "checkpoints/other.ckpt")
    path = run / ".hydra/config.yaml"
    path.unlink()
    with pytest.raises(UsageError, match="there is no such file"):
        command.load_model(run / "checkpoints/last.ckpt")


def test_the_best_checkpoint_of_a_run_is_taken(launch: Launch) -> None:
    run = Path(launch(*SMALL)["directory"])
    (best,) = (run / "checkpoints").glob("epoch*.ckpt")
    assert command.checkpoint_of(run) == best


def test_a_run_of_another_kind_is_refused(launch: Launch) -> None:
    run = launch("trainer.max_epochs=1", "trainer.accelerator=cpu")["directory"]
    with pytest.raises(UsageError, match=r"must have trained a ByteTransformer; .* is a MLP"):
        command.load_model(Path(run))


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
