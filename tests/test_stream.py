"""An IterableDataset is shared out exactly, or refused; nothing is seen twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import SMALL, Launch, quick_and_slow
from faults import break_at
from left import assert_weights_equal, weights
from recording import global_batches, indexed, rows
from streams import Shuffled, streams
from test_resume import WHERE

from lockstep.data.stream import Stream
from lockstep.data.tensors import Tensors
from lockstep.errors import RunFailed, UsageError

STREAM = [*SMALL[1:], "data=stream", "callbacks=recording"]
TWO_EPOCHS = [*STREAM, "trainer.max_epochs=2"]
SAMPLES = {"train": 67, "val": 33, "test": 33}


def in_order(samples: int, size: int) -> list[list[int]]:
    return [list(range(first, min(first + size, samples))) for first in range(0, samples, size)]


CASES = [("ddp-2", 0), ("ddp-2", 2), ("ddp-3", 1), ("spawn-2", 0), ("auto", 2)]


@pytest.mark.processes
@pytest.mark.parametrize(("where", "workers"), quick_and_slow(CASES, [("ddp-2", 2)]))
def test_every_sample_of_a_stream_is_seen_once_in_the_order_of_the_stream(
    launch: Launch, where: str, workers: int
) -> None:
    result = launch(*TWO_EPOCHS, *WHERE[where], f"data.num_workers={workers}")
    directory = Path(result["directory"])
    batches = global_batches(directory)
    for epoch in (0, 1):
        seen = [batch for (when, _), batch in batches.items() if when == epoch]
        assert seen == in_order(67, 12)
    assert result["samples_seen"] == SAMPLES
    for stage, samples in (("val", 33), ("test", 33)):
        seen_of = Counter(i for r in rows(directory) if r["stage"] == stage for i in r["indices"])
        assert set(seen_of) == set(range(samples))
        assert len(set(seen_of.values())) == 1, "each as often as any other"


@pytest.mark.processes
def test_a_stream_that_draws_draws_the_same_on_every_rank_and_after_resuming(
    launch: Launch, tmp_path: Path
) -> None:
    drawn = [*TWO_EPOCHS, "data.datasets.kind=Shuffled", "trainer.log_every_n_steps=1"]
    whole = launch(*drawn)
    broken = tmp_path / "broken"
    where = [*WHERE["ddp-2"], "data.num_workers=2"]
    with pytest.raises(RunFailed):
        launch(*drawn, *where, break_at(1, 2), directory=broken)
    launch(*drawn, *WHERE["auto"], break_at(1, 2), f"resume={broken}", directory=broken)
    batches = global_batches(Path(whole["directory"]))
    first, second = (
        [batch for (epoch, _), batch in batches.items() if epoch == which] for which in (0, 1)
    )
    assert sorted(i for batch in first for i in batch) == list(range(67))
    assert first != second
    done = {place: sorted(set(seen)) for place, seen in global_batches(broken).items()}
    assert done == batches
    assert_weights_equal(weights(broken), weights(whole["directory"]))


def test_a_stream_draws_nothing_from_the_generators_of_the_process() -> None:
    data = indexed(20, 1, 1).train
    assert isinstance(data, Tensors)
    stream = Stream(Shuffled(data), "train")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    stream.start_epoch(0, 0)
    first = [stream[index][1].item() for index in range(20)]
    assert torch.equal(torch.rand(3), expected)
    again = stream[0][1].item(), stream[1][1].item()
    assert again == (first[0], first[1]), "an index that was passed starts the epoch anew"
    stream.start_epoch(0, 1)
    assert [stream[index][1].item() for index in range(20)] != first


@pytest.mark.parametrize(("off_by", "what"), [(-1, "ended after 66"), (1, "goes on after that")])
def test_a_stream_of_another_length_than_it_says_is_refused(off_by: int, what: str) -> None:
    source = streams("Sized", 67, 1, 1, off_by).train
    stream = Stream(source, "train")
    with pytest.raises(UsageError, match=f"Sized says 67, and it {what}"):
        stream.read(list(range(67)))


@pytest.mark.processes
def test_a_stream_that_cannot_be_shared_exactly_is_refused(launch: Launch) -> None:
    with pytest.raises(UsageError, match=r"must have a length.*Unsized, without __len__"):
        launch(*STREAM, "data.datasets.kind=Unsized")
    own = ["data.datasets.kind=SharesItself", "data.num_workers=2"]
    with pytest.raises(UsageError, match=r"SharesItself says \d+, and it ended after \d+"):
        launch(*STREAM, *own)


@pytest.mark.processes
def test_a_stream_whose_order_differs_between_processes_is_refused(launch: Launch) -> None:
    by_process = [*STREAM, "data.datasets.kind=ByProcess"]
    with pytest.raises(
        UsageError, match=r"of ByProcess, those of ranks \[1\] differ from rank 0's"
    ):
        launch(*by_process, *WHERE["ddp-2"])
    unseeded = [*STREAM, "data.datasets.kind=Unseeded"]
    with pytest.raises(UsageError, match=r"67 of Unseeded, two readings in one process differ"):
        launch(*unseeded, "data.num_workers=2")
    alone = launch(*unseeded)  # one reader: any order is one order
    seen = [i for batch in global_batches(Path(alone["directory"])).values() for i in batch]
    assert sorted(seen) == list(range(67))
