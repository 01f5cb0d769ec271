"""Text: who predicts which byte, and which file is in which split."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import compose_config

from lockstep.config import as_config
from lockstep.errors import UsageError
from lockstep.workloads.text.data import (
    cuts_of,
    dealt,
    read_modules,
    stdlib_bytes,
    stdlib_topics,
)
from lockstep.workloads.text.pieces import IGNORED, PADDING, Continuations
from lockstep.workloads.text.sources import modules_of, split_of, top_level_modules

TOPICS = ["asyncio", "email", "importlib", "multiprocessing", "unittest", "xml"]


def every(dataset: Any) -> tuple[torch.Tensor, ...]:
    return dataset.__getitems__(range(len(dataset)))


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
