"""All loggers hold the same, on one process or two, in a sweep, and after a resume."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from conftest import DDP2, SMALL, Command, Launch
from logged import (
    Logged,
    from_csv,
    from_mlflow,
    from_tensorboard,
    from_wandb,
    mlflow_runs,
)

from lockstep.loggers.mlflow import MlflowLogger

pytestmark = pytest.mark.processes


def assert_all_hold_the_same(run: Path, only_elsewhere: Logged | None = None) -> Logged:
    """What metrics.csv has; the other loggers have ``only_elsewhere`` too."""
    expected = from_csv(run) | (only_elsewhere or {})
    store, name = run.parent / "mlflow.db", "/".join(run.parts[-2:])
    for found in (from_tensorboard(run), from_wandb(run), from_mlflow(store, name)):
        assert found == pytest.approx(expected, rel=1e-6)  # TensorBoard keeps 32 bits
    return expected


def mlflow_params(store: Path, run_id: str) -> dict[str, str]:
    with sqlite3.connect(store) as database:
        query = "select key, value from params where run_uuid = ?"
        return dict(database.execute(query, (run_id,)).fetchall())


def test_four_loggers_hold_the_same_keys_steps_and_values_once_of_two_ranks(
    launch: Launch, tmp_path: Path
) -> None:
    result = launch("logger=every", "trainer.max_epochs=2", *DDP2)
    run = Path(result["directory"])
    logged = assert_all_hold_the_same(run)
    epochs = {(f"{part}/loss", step) for part in ("train", "val") for step in (15, 31)}
    assert epochs | {("test/loss", 32), ("test/mae", 32), ("epoch", 32)} <= logged.keys()
    assert logged["test/loss", 32] == pytest.approx(result["metrics"]["test/loss"], rel=1e-12)
    writers = {path.name.split(".")[-2] for path in run.glob("tensorboard/events*")}
    assert writers == {str(result["pids"][0])}, "rank zero's"
    ((run_id, status),) = mlflow_runs(run.parent / "mlflow.db").values()
    assert status == "FINISHED"
    params = mlflow_params(run.parent / "mlflow.db", run_id)
    assert (params["trainer/strategy"], params["model/network/width"]) == ("ddp", "64")


def test_a_resumed_run_goes_on_in_each_logger(launch: Launch, tmp_path: Path) -> None:
    """Also when it becomes longer: MLflow keeps a parameter's first value."""
    run = tmp_path / "date" / "time-id"
    first = launch("logger=every", *SMALL, directory=run, sweep=True)
    launch(f"resume={run}", "trainer.max_epochs=2", directory=run)
    # metrics.csv has the test of the longer run only.
    tested = {("test/loss", 8): first["metrics"]["test/loss"], ("epoch", 8): 1.0}
    logged = assert_all_hold_the_same(run, tested)
    assert {step for name, step in logged if name == "train/loss"} == {7, 15}
    assert {step for name, step in logged if name == "test/loss"} == {8, 16}
    ((run_id, status),) = mlflow_runs(run.parent / "mlflow.db").values()
    assert status == "FINISHED"
    assert mlflow_params(run.parent / "mlflow.db", run_id)["trainer/max_epochs"] == "1"
    with sqlite3.connect(run.parent / "mlflow.db") as database:
        query = "select value from tags where key = 'resumed.trainer/max_epochs'"
        assert database.execute(query).fetchall() == [("2",)]


def test_steps_that_are_computed_again_are_in_mlflow_once(tmp_path: Path) -> None:
    where = {"directory": str(tmp_path / "run"), "tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"}
    before = MlflowLogger(**where)
    for step in (7, 15):
        before.log_metrics({"train/loss": float(step), "epoch": 0}, step)
    after = MlflowLogger(**where)
    after.log_hyperparams({"seed": 0})
    after.rewind(8)
    for step in (15, 23):
        after.log_metrics({"train/loss": float(step), "epoch": 0}, step)
    after.finalize("failed")
    name = f"{tmp_path.name}/run"
    expected = {("train/loss", step): float(step) for step in (7, 15, 23)}
    found = from_mlflow(tmp_path / "mlflow.db", name)
    assert {place: value for place, value in found.items() if place[0] != "epoch"} == expected
    assert [status for _, status in mlflow_runs(tmp_path / "mlflow.db").values()] == ["FAILED"]


@pytest.mark.slow
def test_jobs_that_run_at_once_are_a_run_each_in_one_store(train: Command) -> None:
    """They make the store's tables at the same moment, from nothing."""
    done = train(
        "-m",
        "hydra/launcher=slots",
        "hydra.launcher.slots=2",
        "logger=every",
        "trainer.max_epochs=1",
        "trainer.strategy=auto,ddp",
        "trainer.devices=1",
        "optimizer.lr=0.01,0.02",
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    runs = [Path(result["directory"]) for result in done.results]
    assert len(runs) == 4
    store = runs[0].parent / "mlflow.db"
    held = mlflow_runs(store)
    assert held.keys() == {"/".join(run.parts[-2:]) for run in runs}
    for run, result in zip(runs, done.results, strict=True):
        run_id, status = held["/".join(run.parts[-2:])]
        assert status == "FINISHED"
        rate = mlflow_params(store, run_id)["optimizer/lr"]
        assert float(rate) == result["learning_rate"]
        assert_all_hold_the_same(run)
