"""A logger that fails does not lose a run, and no key lands in what a run leaves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from conftest import DDP2, SMALL, Command, Launch
from lightning.pytorch.loggers import Logger
from typing_extensions import override

KEY = "0123456789abcdef0123456789abcdef01234567"


class Failing(Logger):
    """A logger whose server goes away at one of its calls."""

    def __init__(self, at: str, marks: str) -> None:
        super().__init__()
        self.at, self.marks = at, Path(marks)

    @property
    @override
    def name(self) -> str:
        return "failing"

    @property
    @override
    def version(self) -> str:
        return ""

    def _called(self, name: str) -> None:
        with self.marks.open("a") as file:
            file.write(f"{name}\n")
        if name == self.at:
            raise ConnectionError("the server is away")

    @override
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self._called("log_hyperparams")

    @override
    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self._called("log_metrics")

    @override
    def finalize(self, status: str) -> None:
        self._called("finalize")


@pytest.mark.parametrize("at", ["log_hyperparams", "log_metrics", "finalize"])
def test_a_failing_logger_is_told_once_then_left_alone_and_the_run_finishes(
    launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture, at: str
) -> None:
    marks = tmp_path / "marks"
    failing = f"+logger.failing={{_target_: test_logger_faults.Failing, at: {at}, marks: {marks}}}"
    with caplog.at_level(logging.WARNING):
        result = launch(*SMALL, failing)
    assert result["status"] == "finished"
    assert "test/loss" in result["metrics"]
    told = [record.message for record in caplog.records if "Failing failed" in record.message]
    assert len(told) == 1
    assert f"in {at}" in told[0]
    assert "ConnectionError: the server is away" in told[0]
    calls = marks.read_text().split()
    assert calls.index(at) == len(calls) - 1, "nothing after the failure"
    rows = (Path(result["directory"]) / "metrics.csv").read_text().splitlines()
    assert len(rows) == 3, "one epoch, one test"


@pytest.mark.processes
def test_mlflow_without_its_server_finishes_with_one_warning(train: Command) -> None:
    """Two ranks wait for the first one's attempts; nothing listens at port 9."""
    done = train(
        *SMALL,
        "logger=mlflow",
        "logger.mlflow.tracking_uri=http://127.0.0.1:9",
        *DDP2,
    )
    assert done.returncode == 0, done.stderr
    assert done.results[0]["status"] == "finished"
    log = next(done.directory.glob("outputs/*/*/train.log")).read_text()
    assert log.count("MlflowLogger failed") == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("override", "named"),
    [
        (f"+logger.wandb.settings.api_key={KEY}", "logger.wandb.settings.api_key"),
        (f"+notes.mine={KEY}", "notes.mine"),
        ("+notes.mine=${oc.env:WANDB_API_KEY}", "notes.mine"),
        ("+notes.at='https://me:hunter22@host'", "notes.at"),
    ],
    ids=["by-name", "by-value", "by-interpolation", "in-an-address"],
)
def test_a_key_in_the_config_is_refused_without_being_shown(
    train: Command, override: str, named: str
) -> None:
    done = train("logger=wandb", override, env={"WANDB_API_KEY": KEY})
    assert done.returncode == 1
    assert f"error: {named} must not hold a key" in done.stderr
    assert_nowhere(done.directory, done.stdout + done.stderr)


@pytest.mark.processes
def test_the_key_of_wandb_lands_in_no_file_of_a_run(train: Command) -> None:
    done = train(*SMALL, "logger=wandb", env={"WANDB_API_KEY": KEY})
    assert done.returncode == 0, done.stderr
    assert len(list(done.directory.glob("outputs/*/*/wandb/offline-run-*/*.wandb"))) == 1
    assert_nowhere(done.directory, done.stdout + done.stderr)


def assert_nowhere(directory: Path, printed: str) -> None:
    for secret in (KEY, "hunter22"):
        assert secret not in printed
        files = [path for path in directory.rglob("*") if path.is_file()]
        assert not [path for path in files if secret.encode() in path.read_bytes()]
