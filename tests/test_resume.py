"""A run that broke or was stopped goes on, and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest
from conftest import SMALL, Launch, on, quick_and_slow
from faults import break_at
from left import assert_weights_equal, checkpoint, history, weights
from recording import global_batches, rows

from lockstep.errors import RunFailed, UsageError
from lockstep.results import Result, read_result
from lockstep.resume import newest_checkpoint
from lockstep.rundir import run_directory

pytestmark = pytest.mark.processes

RUN = [
    "data=indexed",
    "data.datasets.train=67",  # 6 batches of 12; the last one has 7 samples
    "data.global_batch_size=12",
    "model=mlp",
    "model.network.features=10",
    "model.network.width=8",
    "optimizer=adam",
    "callbacks=recording",
    "trainer.max_epochs=3",
    "trainer.log_every_n_steps=1",
]
STEPS = 18
WHERE = {
    "auto": on("auto", 1),
    "dp-2": on("dp"),
    "ddp-2": on("ddp"),
    "ddp-3": on("ddp", 3),
    "spawn-2": on("ddp_spawn"),
}


def assert_same_run(directory: Path, reference: Path, broken_at: int | None = None) -> None:
    """Weights to 1e-6 of the largest; each global batch once; the history row by row.

    ``broken_at``: the last step of an epoch with a step that broke. Its sums are lost, so its
    train/loss counts the batches after it; an accumulation that it cut short is done again.
    """
    assert_weights_equal(weights(directory), weights(reference))
    unique = set if broken_at else list
    batches = {place: sorted(unique(seen)) for place, seen in global_batches(directory).items()}
    assert batches == global_batches(reference)
    old, new = history(reference), history(directory)
    assert [row["step"] for row in new] == [row["step"] for row in old]
    for before, after in zip(old, new, strict=True):
        assert after.keys() == before.keys()
        for name in before:
            lost = name == "train/loss" and before["step"] == str(broken_at)
            if (before[name] or after[name]) and not lost:
                assert float(after[name]) == pytest.approx(float(before[name]), rel=1e-5), before


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the run that nothing happened to, on one device."""
    return tmp_path_factory.mktemp("uninterrupted") / "run"


@pytest.fixture
def reference(launch: Launch, uninterrupted: Path) -> Path:
    if not uninterrupted.exists():
        assert launch(*RUN, directory=uninterrupted)["steps"] == STEPS
    return uninterrupted


MOVES = [
    ("auto", "auto"),
    ("ddp-2", "ddp-2"),
    ("ddp-2", "auto"),
    ("auto", "ddp-3"),
    ("ddp-3", "spawn-2"),
    ("dp-2", "ddp-2"),
    ("spawn-2", "dp-2"),
]
PLACES = [(1, 2), (1, 0), (2, 5)]
"""Epoch and batch: in the middle of an epoch, its first batch, its last."""
BROKEN = [(before, after, place) for before, after in MOVES for place in PLACES]
QUICK_BROKEN = [
    ("ddp-2", "auto", (1, 2)),
    ("auto", "ddp-3", (1, 0)),
    ("ddp-3", "spawn-2", (2, 5)),
    ("dp-2", "ddp-2", (1, 2)),
]


@pytest.mark.parametrize(("before", "after", "place"), quick_and_slow(BROKEN, QUICK_BROKEN))
def test_a_run_that_broke_ends_as_if_it_had_not(
    launch: Launch, tmp_path: Path, reference: Path, before: str, after: str, place: tuple[int, int]
) -> None:
    run = tmp_path / "run"
    with pytest.raises(RunFailed, match="broken on purpose"):
        launch(*RUN, *WHERE[before], break_at(*place), directory=run)
    done = len({(row["epoch"], row["batch"]) for row in rows(run) if row["stage"] == "train"})
    assert done == place[0] * 6 + place[1]
    result = launch(f"resume={run}", *WHERE[after], directory=run)
    assert (result["status"], result["steps"]) == ("finished", STEPS)
    assert result["resumed_from"] == str(run / "checkpoints" / "last_good.ckpt")
    assert_same_run(run, reference, broken_at=place[0] * 6 + 5)


@pytest.mark.parametrize(
    ("before", "after"),
    [("auto", "auto"), ("ddp-2", "ddp-2"), ("auto", "ddp-2"), ("spawn-2", "spawn-2")],
)
@pytest.mark.parametrize("place", [(0, 2), (1, 5)], ids=["middle", "last"])
def test_a_stopped_run_goes_on_and_ends_as_if_it_had_not_stopped(
    launch: Launch, tmp_path: Path, reference: Path, before: str, after: str, place: tuple[int, int]
) -> None:
    run = tmp_path / "run"
    rank = 0 if before == "auto" else 1
    with pytest.raises(SystemExit) as stopped:
        launch(*RUN, *WHERE[before], break_at(*place, how="SIGTERM", rank=rank), directory=run)
    assert stopped.value.code == 143
    assert read_result(run / "result.json")["status"] == "interrupted"
    result = launch(f"resume={run}", *WHERE[after], directory=run)
    assert result["resumed_from"] == str(run / "checkpoints" / "interrupted.ckpt")
    assert_same_run(run, reference)


@pytest.mark.parametrize(
    ("how", "batch"),
    quick_and_slow(
        [(how, batch) for how in ("raise", "SIGTERM") for batch in (2, 3, 5)],
        [("raise", 3), ("SIGTERM", 5)],
    ),
)
def test_an_accumulation_that_was_cut_short_is_done_again(
    launch: Launch, tmp_path: Path, how: str, batch: int
) -> None:
    run = [*RUN, "trainer.accumulate_grad_batches=2", *WHERE["ddp-2"]]
    launch(*run, directory=tmp_path / "reference")
    with pytest.raises((RunFailed, SystemExit)):
        launch(*run, break_at(1, batch, how), directory=tmp_path / "run")
    launch(f"resume={tmp_path / 'run'}", directory=tmp_path / "run")
    broken_at = {"raise": 5, "SIGTERM": None}[how]  # the accumulated step that ends the epoch
    assert_same_run(tmp_path / "run", tmp_path / "reference", broken_at)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_dropout_draws_as_if_the_run_had_not_stopped(
    launch: Launch, tmp_path: Path, workers: int
) -> None:
    plain = [item for item in RUN if not item.startswith("model")]
    run = [*plain, "model=dropout", f"data.num_workers={workers}", *WHERE["ddp-2"]]
    launch(*run, directory=tmp_path / "reference")
    with pytest.raises(SystemExit):
        launch(*run, break_at(1, 2, "SIGTERM"), directory=tmp_path / "run")
    launch(f"resume={tmp_path / 'run'}", directory=tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "reference")


def test_early_stopping_and_the_best_score_are_taken_up(launch: Launch, tmp_path: Path) -> None:
    stopping = (
        "+callbacks.stop={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss, "
        "patience: 2, min_delta: 1e9}"
    )
    run = [*RUN, stopping, "trainer.max_epochs=9", *WHERE["ddp-2"]]
    reference = launch(*run, directory=tmp_path / "reference")
    assert reference["epochs"] == 3
    with pytest.raises(SystemExit):
        launch(*run, break_at(2, 1, "SIGTERM"), directory=tmp_path / "run")
    resumed = launch(f"resume={tmp_path / 'run'}", directory=tmp_path / "run")
    assert resumed["epochs"] == 3
    assert_same_run(tmp_path / "run", tmp_path / "reference")

    def best(directory: Path) -> float:
        states = checkpoint(directory)["callbacks"].values()
        (score,) = (state["best_model_score"] for state in states if "best_model_score" in state)
        return float(score)

    assert best(tmp_path / "run") == pytest.approx(best(tmp_path / "reference"), rel=1e-6)


def test_a_run_by_steps_goes_on_too(launch: Launch, tmp_path: Path) -> None:
    run = [*RUN, "trainer.max_epochs=-1", "trainer.max_steps=15", "scheduler=none"]
    launch(*run, directory=tmp_path / "reference")
    for place in ((0, 3), (1, 0)):
        directory = tmp_path / f"run{place[1]}"
        with pytest.raises(SystemExit):
            launch(*run, break_at(*place, "SIGTERM"), directory=directory)
        assert launch(f"resume={directory}", directory=directory)["steps"] == 15
        assert_same_run(directory, tmp_path / "reference")


def test_a_finished_run_is_trained_further(launch: Launch, tmp_path: Path) -> None:
    launch(*RUN, "scheduler=none", directory=tmp_path / "reference")
    run = tmp_path / "run"
    launch(*RUN, "scheduler=none", "trainer.max_epochs=2", directory=run)
    with pytest.raises(UsageError, match=r"is finished\. To train it further, add for example"):
        launch(f"resume={run}", directory=run)
    result = launch(f"resume={run}", "trainer.max_epochs=3", *WHERE["ddp-2"], directory=run)
    assert (result["epochs"], result["strategy"]) == (3, "ddp")
    assert_same_run(run, tmp_path / "reference")


def test_a_feature_may_be_added_and_a_cut_line_of_the_history_is_left_out(
    launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [*SMALL, "optimizer.lr=1e-5", "trainer.log_every_n_steps=1"]
    launch(*keys, "trainer.max_epochs=2", directory=tmp_path / "reference")
    run = tmp_path / "run"
    launch(*keys, directory=run)
    before = history(run)
    with (run / "metrics.csv").open("a") as file:
        file.write("1,0")
    more = [f"resume={run}", "trainer.max_epochs=2", "features=grad_norm"]
    result = launch(*keys, *more, directory=run)
    assert (result["epochs"], result["resumed_from"] is None) == (2, False)
    assert f"line {len(before) + 2} of {run / 'metrics.csv'} was cut" in caplog.text
    assert_weights_equal(weights(run), weights(tmp_path / "reference"), tolerance=0)
    rows_after, rows_reference = history(run), history(tmp_path / "reference")
    losses, expected = (
        {row["step"]: row["train/loss"] for row in table if row["train/loss"]}
        for table in (rows_after, rows_reference)
    )
    assert losses == expected
    norms = [int(row["step"]) for row in rows_after if row["train/grad_norm"]]
    assert norms == list(range(8, 16)), "of the second epoch alone"


def test_a_torn_checkpoint_is_skipped_with_a_line(
    launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    with pytest.raises(SystemExit):
        launch(*RUN, break_at(1, 2, "SIGTERM"), directory=run)
    newest = newest_checkpoint(run)
    assert newest is not None
    assert newest.name == "interrupted.ckpt"
    whole = newest.read_bytes()
    with zipfile.ZipFile(newest) as file:
        tensor = file.read(max(file.infolist(), key=lambda item: item.file_size))
    place = whole.index(tensor) + len(tensor) // 2
    flipped = whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :]
    for torn in (whole[:place], b"", flipped):
        newest.write_bytes(torn)
        caplog.clear()
        found = newest_checkpoint(run)
        assert found is not None
        assert found.name in ("last.ckpt", "epoch000-step000006.ckpt")
        assert "interrupted.ckpt is damaged" in caplog.text
    assert launch(f"resume={run}", directory=run)["steps"] == STEPS


def test_overrides_that_change_the_model_are_refused_by_key(launch: Launch, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(SystemExit):
        launch(*RUN, break_at(1, 2, "SIGTERM"), directory=run)
    stored = (run / ".hydra" / "config.yaml").read_bytes()
    for override, words in (
        ("model.network.width=16", r"model.network.width \(8 -> 16\)"),
        ("seed=7", r"seed \(0 -> 7\)"),
        ("optimizer=sgd", r"optimizer._target_ \(torch.optim.Adam -> torch.optim.SGD\)"),
        ("data.global_batch_size=24", r"data.global_batch_size \(12 -> 24\)"),
    ):
        with pytest.raises(UsageError, match=words):
            launch(f"resume={run}", override, directory=run)
    assert (run / ".hydra" / "config.yaml").read_bytes() == stored
    assert read_result(run / "result.json")["status"] == "interrupted"


def test_latest_is_the_newest_that_trained_not_a_refusal_or_a_use(tmp_path: Path) -> None:
    trained, used, refused = (tmp_path / "day" / name for name in ("a", "b", "c"))
    for run, result in ((trained, {}), (used, {"task": "testing a"})):
        (run / ".hydra").mkdir(parents=True)
        (run / ".hydra/config.yaml").touch()
        (run / "result.json").write_text(json.dumps(result))
    refused.mkdir()
    (refused / "result.json").write_text("{}")
    for age, run in enumerate((refused, used, trained)):
        os.utime(run / "result.json", (1e9 - age, 1e9 - age))
    assert run_directory(str(tmp_path), "latest") == str(trained)
    with pytest.raises(UsageError, match=r"a run that trains; .*b is of testing a"):
        run_directory(str(tmp_path), str(used))


def test_a_directory_without_a_run_is_refused(launch: Launch, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds none"):
        launch(f"resume={tmp_path / 'empty'}", directory=tmp_path / "empty")


def test_a_run_that_is_being_written_cannot_be_resumed(launch: Launch, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl", reason="needs POSIX file locks")
    run = tmp_path / "run"
    with pytest.raises(SystemExit):
        launch(*RUN, break_at(1, 2, "SIGTERM"), directory=run)
    other = os.open(run, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(UsageError, match="A run is writing to"):
        launch(f"resume={run}", directory=run)
    os.close(other)
    assert launch(f"resume={run}", directory=run)["steps"] == STEPS


def test_a_run_without_a_checkpoint_starts_again(
    launch: Launch, tmp_path: Path, reference: Path
) -> None:
    run = tmp_path / "run"
    with pytest.raises(RunFailed):
        launch(*RUN, break_at(0, 0), directory=run)
    result = launch(f"resume={run}", directory=run)
    assert result["resumed_from"] is None
    assert_same_run(run, reference)


def test_init_from_takes_the_weights_and_nothing_else(
    launch: Launch, tmp_path: Path, reference: Path
) -> None:
    origin = reference / "checkpoints" / "last.ckpt"
    result = launch(*RUN, f"init_from={origin}", "optimizer.lr=0", directory=tmp_path / "new")
    assert result["steps"] == STEPS
    assert_weights_equal(weights(tmp_path / "new"), weights(reference), tolerance=0)
    with pytest.raises(UsageError, match="must hold the weights of this model"):
        launch(*RUN, f"init_from={origin}", "model.network.width=16", directory=tmp_path / "other")
    with pytest.raises(UsageError, match=r"there is no nowhere\.ckpt"):
        launch(*RUN, "init_from=nowhere.ckpt", directory=tmp_path / "none")


@pytest.mark.parametrize(
    ("how", "words"), [("SIGKILL", "rank 1 was ended by SIGKILL"), ("raise", "broken on purpose")]
)
def test_a_rank_that_dies_is_restarted_from_the_newest_checkpoint(
    launch: Launch,
    tmp_path: Path,
    reference: Path,
    how: str,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = tmp_path / "run"
    fault = break_at(1, 2, how, rank=1)
    result = launch(*RUN, *WHERE["ddp-2"], fault, "launch.max_restarts=1", directory=run)
    assert (result["status"], result["steps"]) == ("finished", STEPS)
    assert words in caplog.text
    assert "restart 1 of 1 from" in caplog.text
    assert_weights_equal(weights(run), weights(reference))
    assert [row["step"] for row in history(run)] == [row["step"] for row in history(reference)]


def test_restarts_come_to_an_end(
    launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = [item for item in RUN if not item.startswith("model")]
    broken = [*plain, "model=failing", "model.fail.rank=0", "launch.max_restarts=2"]
    with pytest.raises(RunFailed, match="broken on purpose"):
        launch(*broken, directory=tmp_path / "run")
    assert caplog.text.count("rank 0 failed:") == 3
    assert "restart 2 of 2 from" in caplog.text
    assert read_result(tmp_path / "run" / "result.json")["status"] == "failed"


def test_a_result_of_a_resumed_run_is_whole(launch: Launch, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(SystemExit):
        launch(*RUN, break_at(1, 2, "SIGTERM"), directory=run)
    result: Result = launch(f"resume={run}", directory=run)
    assert result["samples_seen"] == {"train": 67, "val": 33, "test": 33}
    assert result["epochs"] == 3


@pytest.mark.parametrize(
    ("batch", "validates"),
    quick_and_slow(
        [(batch, validates) for batch in (1, 3) for validates in (True, False)],
        [(1, True), (3, False)],
    ),
)
def test_a_killed_rank_goes_on_from_a_checkpoint_in_an_epoch(
    launch: Launch, tmp_path: Path, batch: int, validates: bool
) -> None:
    """Rank 0, which could save what it had, is gone; but every second step is saved: for the kill
    in batch 1 that is an epoch's last one."""
    often = ["callbacks.checkpoint.every_n_train_steps=2", "callbacks.checkpoint.monitor=null"]
    validation = [] if validates else ["trainer.limit_val_batches=0"]
    run = [*RUN, *often, *validation, *WHERE["ddp-2"], "launch.max_restarts=1"]
    launch(*run, directory=tmp_path / "reference")
    result = launch(*run, break_at(1, batch, "SIGKILL", rank=0), directory=tmp_path / "run")
    assert Path(result["resumed_from"]).name.startswith(("last", "epoch"))
    assert_weights_equal(weights(tmp_path / "run"), weights(tmp_path / "reference"))
    assert history(tmp_path / "run") == history(tmp_path / "reference")


def test_wandb_goes_on_with_the_same_run(launch: Launch, tmp_path: Path) -> None:
    run = tmp_path / "date" / "time-id"
    with pytest.raises(SystemExit):
        launch(*RUN, "logger=wandb", break_at(1, 2, "SIGTERM"), directory=run, sweep=True)
    launch(f"resume={run}", directory=run)
    folders = sorted(path.name for path in run.glob("wandb/offline-run-*"))
    assert len(folders) == 2
    assert {name.partition("-date-")[2] for name in folders} == {"time-id"}
