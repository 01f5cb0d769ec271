"""``find=batch`` names the fewest micro-steps that fit on each rank, and changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from bounded import GRADIENTS, STATE
from conftest import Launch
from left import assert_weights_equal, network_weights, table
from test_features import RUN, STRATEGIES, TABLE, where

from lockstep.errors import RunFailed, UsageError
from lockstep.find.division import Division, divisions, largest
from lockstep.find.memory import ran_out

SAMPLES, STEP = 64, 32
PLAIN = [*RUN, f"data.datasets.train={SAMPLES}", "optimizer.momentum=0.9", "trainer.max_epochs=2"]
FIND = ["find=batch", "find.limit_bytes=1e15"]  # a CPU must have one; the modules have their own
MOST = [10, 5]  # of rank 0 and 1; dp gives each replica of its one process as many as rank 0
FITS = [4, 2]
SIZES = {"single": 4, "dp": 8, "ddp": 2, "ddp_spawn": 2}
TRIED = {
    "single": [[1, 2, 4, 8]],
    "dp": [[1, 2, 4, 8, 16]],
    "ddp": [[1, 2, 4, 8], [1, 2, 4]],
}
TRIED["ddp_spawn"] = TRIED["ddp"]


def bounded(most: list[int]) -> list[str]:
    return ["model._target_=bounded.Bounded", f"+model.most={most}"]


@pytest.fixture(scope="module")
def whole_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run that accumulates nothing lies, on one device."""
    return tmp_path_factory.mktemp("whole")


@pytest.mark.processes
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_suggestion_fits_on_each_rank_and_trains_to_the_weights_without_it(
    launch: Launch, strategy: str, whole_steps: Path
) -> None:
    assert TABLE["batch-size finder", strategy] == "same"
    place = [*where(strategy), "trainer.accelerator=cpu"]
    own = [*PLAIN, *bounded(MOST), *place]
    found = launch(*own, f"data.global_batch_size={STEP}", *FIND)
    ranks = 2 if "ddp" in strategy else 1
    size = SIZES[strategy]
    division = {
        "data.global_batch_size": size * ranks,
        "trainer.accumulate_grad_batches": STEP // ranks // size,
    }
    assert list(found["metrics"].values()) == list(division.values())
    for fits, most in zip(FITS, MOST, strict=True):
        assert fits + STATE + GRADIENTS <= most < 2 * fits + STATE + GRADIENTS

    rows = table(found["output"])
    for rank, tried in enumerate(TRIED[strategy]):
        mine = [row for row in rows if row["rank"] == str(rank)]
        assert [int(row["size"]) for row in mine] == tried
        assert [int(row["fits"]) for row in mine] == [1] * (len(tried) - 1) + [0]
        assert all(int(row["peak_memory_bytes"]) > 0 for row in mine)
    left = {path.name for path in Path(found["directory"]).iterdir()}
    changed = {f"changed-{rank}.json" for rank in range(ranks)}
    assert left - changed - {"train.log"} == {".hydra", "find_batch.csv", "result.json"}
    for name in changed:
        assert json.loads((Path(found["directory"]) / name).read_text()) == []

    words = [f"{key}={value}" for key, value in division.items()]
    suggested = launch(*own, *words)
    assert suggested["steps"] == 2 * SAMPLES // STEP
    if not any(whole_steps.iterdir()):
        launch(*PLAIN, f"data.global_batch_size={STEP}", directory=whole_steps)
    spread = network_weights(suggested["directory"])  # the buffer is of `Bounded` alone
    assert_weights_equal(spread, network_weights(whole_steps))


def test_a_larger_batch_than_the_suggestion_runs_out_of_memory(launch: Launch) -> None:
    own = [*PLAIN, *bounded(MOST)]
    larger = ["data.global_batch_size=8", "trainer.accumulate_grad_batches=4"]
    with pytest.raises(RunFailed, match="out of memory"):
        launch(*own, *larger)


def test_what_was_accumulated_before_counts_and_what_will_differ_is_said(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    before = ["data.global_batch_size=12", "trainer.accumulate_grad_batches=4"]
    batch_norm = ["model=batch_norm", *bounded([9])]
    own = [word for word in PLAIN if not word.startswith("model")]
    rows = table(launch(*own, *batch_norm, *before, *FIND)["output"])
    assert [int(row["size"]) for row in rows] == [2, 4, 8, 6], "48 is 8 times 6"
    assert "use: data.global_batch_size=6 trainer.accumulate_grad_batches=8" in caplog.text
    assert "last optimizer step has 16 of 48 samples" in caplog.text
    assert "BatchNorm normalizes each micro-step" in caplog.text


@pytest.mark.parametrize("share", [1, 7, 12, 30, 64, 360])
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_search_finds_the_largest_size_that_divides_and_fits(
    share: int, world_size: int
) -> None:
    ways = divisions(share * world_size, world_size, samples=1000)
    sizes = [way.per_process for way in ways]
    assert sizes == [size for size in range(1, share + 1) if share % size == 0]
    assert all(way.global_batch_size == way.per_process * world_size for way in ways)
    assert all(way.per_process * way.micro_steps == share for way in ways)
    for most in range(share + 2):
        tried: list[int] = []

        def fits(way: Division, most: int = most, tried: list[int] = tried) -> bool:
            tried.append(way.per_process)
            return way.per_process <= most

        place = largest(ways, fits)
        assert (0 if place is None else sizes[place]) == max(
            [size for size in sizes if size <= most], default=0
        )
        good = [size for size in tried if size <= most]
        assert len(set(tried)) == len(tried), "none is tried twice"
        # At most the next size that is twice as large as one that fits.
        after = [min(s for s in [*sizes, share] if s >= min(2 * size, share)) for size in good]
        assert max(tried) <= max([*after, 1])


def test_a_data_set_in_one_batch_is_tried_once(launch: Launch) -> None:
    ways = divisions(64, 2, samples=10)
    assert [(way.per_process, way.micro_steps) for way in ways] == [
        (1, 32),
        (2, 16),
        (4, 8),
        (32, 1),
    ]
    own = [*PLAIN, *bounded([10 + STATE]), "data.datasets.train=10", "data.global_batch_size=64"]
    found = launch(*own, *FIND)
    assert list(found["metrics"].values()) == [64, 1], "no gradients beside"


def hungry(samples: int) -> list[str]:
    return [*PLAIN, "model._target_=bounded.Hungry", f"data.global_batch_size={samples}"]


def test_a_limit_is_compared_with_what_the_process_held(launch: Launch) -> None:
    # Six samples are 384 MiB, halfway between four and eight of them.
    held = psutil.Process().memory_info().rss
    found = launch(*hungry(16), "find=batch", f"find.limit_bytes={held + 384 * 2**20}")
    rows = table(found["output"])
    assert [(int(row["size"]), int(row["fits"])) for row in rows] == [
        *((1, 1), (2, 1), (4, 1), (8, 0))
    ]
    peaks = [int(row["peak_memory_bytes"]) for row in rows]
    for less, more, size in zip(peaks, peaks[1:], (1, 2, 4), strict=False):
        assert more - less == pytest.approx(size * 64 * 2**20, rel=0.25)


def too_much(launch: Launch) -> Any:
    return launch(*PLAIN, *bounded([3]), *FIND)


def broken(launch: Launch) -> Any:
    return launch(*PLAIN, "model._target_=bounded.Broken", *FIND)


def without_limit(launch: Launch) -> Any:
    return launch(*PLAIN, "find=batch", "trainer.accelerator=cpu")


def by_hand(launch: Launch) -> Any:
    return launch("data=indexed", "model=own", "model._target_=recording.OwnManual", *FIND)


def with_loaders(launch: Launch) -> Any:
    return launch("data=own_loaders", "model=linear", *FIND)


FAULTS: dict[Callable[[Launch], Any], tuple[type[Exception], str]] = {
    too_much: (UsageError, "no batch that fits: one of 1 is too much for rank 0. Use features"),
    broken: (RunFailed, "broken on purpose"),
    without_limit: (UsageError, "needs find.limit_bytes on a CPU.*Use for example find.limit"),
    by_hand: (UsageError, "OwnManual.automatic_optimization is false. Try data.global_batch_size"),
    with_loaders: (UsageError, "OwnLoaders makes its own batches. Return Splits"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_cannot_be_tried_is_said_and_what_breaks_is_not_taken_for_memory(
    launch: Launch, fault: Callable[[Launch], Any]
) -> None:
    kind, match = FAULTS[fault]
    with pytest.raises(kind, match=match):
        fault(launch)


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("find.steps_per_trial=1", "at least 2; got 1"),
        ("find.limit_bytes=0", "greater than 0, or null; got 0"),
        ("+find.size=5", "find=batch: .*'size'.*conf/find/batch.yaml"),
        ("trainer.fast_dev_run=true", "find=batch needs 3 steps.*Use trainer.fast_dev_run=false"),
        ("strategy=local_sgd", "got trainer.strategy=local_sgd. Use trainer.strategy=ddp"),
        ("strategy=deepspeed", "got trainer.strategy=deepspeed. Use trainer.strategy=ddp"),
        ("strategy=fsdp", "got trainer.strategy=fsdp. Use trainer.strategy=ddp"),
    ],
)
def test_what_cannot_be_found_is_said_before_anything_starts(
    launch: Launch, override: str, match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        launch(*PLAIN, *FIND, override)


def test_only_errors_of_memory_are_taken_for_it() -> None:
    assert ran_out(torch.OutOfMemoryError("CUDA out of memory."))
    assert ran_out(RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"))
    assert not ran_out(RuntimeError("CUDA error: device-side assert triggered"))
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert ran_out(raised.value)
