"""What the loggers write, read back with their own readers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import DDP2, ROOT, SMALL, Command, Launch
from left import history, table

from lockstep.loggers.csv import CsvLogger
from lockstep.results import read_result


def test_csv_has_one_row_per_step_and_all_columns(tmp_path: Path) -> None:
    logger = CsvLogger(str(tmp_path))
    logger.log_metrics({"val/loss": 2.0, "epoch": 0}, step=7)
    logger.save()
    logger.log_metrics({"train/loss": 1.0, "epoch": 0}, step=7)
    logger.log_metrics({"val/loss": 1.5, "epoch": 1}, step=15)
    logger.save()
    assert [row["step"] for row in table(tmp_path / "metrics.csv")] == ["7"]
    logger.log_metrics({"test/loss": 1.2}, step=16)
    logger.finalize("success")
    rows = table(tmp_path / "metrics.csv")
    assert [
        (row["step"], row["val/loss"], row["train/loss"], row["test/loss"]) for row in rows
    ] == [
        ("7", "2.0", "1.0", ""),
        ("15", "1.5", "", ""),
        ("16", "", "", "1.2"),
    ]
    assert all(float(row["seconds"]) >= 0 for row in rows)


@pytest.mark.processes
def test_csv_of_two_ranks_equals_that_of_one(launch: Launch) -> None:
    overrides = ["trainer.max_epochs=3"]
    single = launch(*overrides)
    spread = launch(*overrides, *DDP2)
    tables = [history(result["directory"]) for result in (single, spread)]
    assert [row["step"] for row in tables[0]] == ["15", "31", "47", "48"]
    for one, two in zip(*tables, strict=True):
        assert one.keys() == two.keys()
        for name in one:
            assert bool(one[name]) == bool(two[name])
            if one[name]:
                assert float(two[name]) == pytest.approx(float(one[name]), rel=1e-5)
    last = tables[1][-1]
    assert float(last["test/loss"]) == pytest.approx(spread["metrics"]["test/loss"], rel=1e-6)


@pytest.mark.processes
def test_tensorboard_holds_the_metrics_and_the_config(launch: Launch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = launch(*SMALL, "logger=tensorboard", *DDP2)
    directory = Path(result["directory"]) / "tensorboard"
    events = EventAccumulator(str(directory)).Reload()
    assert {"train/loss", "val/loss", "test/loss"} <= set(events.Tags()["scalars"])
    (point,) = events.Scalars("test/loss")
    assert point.value == pytest.approx(result["metrics"]["test/loss"], rel=1e-6)
    assert (Path(result["directory"]) / "metrics.csv").exists()


def wandb_run(directory: Path) -> tuple[dict[str, Any], dict[str, Any], int | None]:
    """Config, summary and exit code of the one offline run below ``directory``."""
    (path,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    text = subprocess.check_output(command, text=True)
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    code = None
    for record in map(json.loads, text.splitlines()):
        if record["type"] in ("config", "summary"):
            into = config if record["type"] == "config" else summary
            into.update(record[record["type"]]["update"])
        if record["type"] == "exit":
            code = record["exit"].get("exit_code", 0)
    return config, summary, code


@pytest.mark.slow
@pytest.mark.processes
def test_a_wandb_sweep_is_one_finished_run_per_job_with_its_own_config(train: Command) -> None:
    done = train(
        "-m",
        *SMALL[:-2],
        SMALL[-1],
        "logger=wandb",
        *DDP2,
        "optimizer.lr=2e-6,3e-6",
        "model=failing",
        "model.fail.rank=1,null",
        timeout=200,
    )
    assert done.returncode == 1
    paths = [path.parent for path in sorted(done.directory.glob("**/result.json"))]
    assert len(paths) == 4
    for path in paths:
        result = read_result(path / "result.json")
        config, summary, code = wandb_run(path)
        (rate,) = [o.partition("=")[2] for o in result["overrides"] if o.startswith("optimizer.lr")]
        failed = result["status"] == "failed"
        assert config["optimizer"]["lr"] == float(rate)
        assert config["model"]["fail"]["step"] == 1, "plain nested values"
        assert code == (1 if failed else 0)
        if not failed:
            assert summary["test/loss"] == pytest.approx(result["metrics"]["test/loss"], rel=1e-6)


@pytest.mark.processes
def test_the_command_of_a_wandb_agent_trains_with_the_values_that_it_was_given(
    train: Command,
) -> None:
    """The agent's own function makes the arguments; without a network, the run is offline."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    sweep = yaml.safe_load((ROOT / "sweeps" / "wandb.yaml").read_text())
    drawn = {"optimizer.lr": {"value": 0.02}, "model.network.width": {"value": 32}}
    assert sweep["parameters"].keys() == drawn.keys()
    variables = create_sweep_command_args({"args": drawn})
    words: list[str] = []
    for word in sweep["command"]:
        words += variables[word[2:-1]] if word == "${args_no_hyphens}" else [word]
    assert words[:3] == ["${env}", "${interpreter}", "${program}"]
    done = train(
        *words[3:],
        "logger.wandb.offline=true",
        *DDP2,
        "trainer.max_epochs=1",
        env={"WANDB_SWEEP_ID": "sweep1", "WANDB_RUN_ID": "run1"},
    )
    assert done.returncode == 0, done.stderr
    (run,) = done.directory.glob("outputs/*/*")
    (folder,) = run.glob("wandb/offline-run-*")
    assert folder.name.endswith("-run1")
    config, summary, code = wandb_run(run)
    assert config["optimizer"]["lr"] == 0.02
    assert config["model"]["network"]["width"] == 32
    assert summary["val/loss"] == pytest.approx(done.results[0]["metrics"]["val/loss"], rel=1e-6)
    assert code == 0
