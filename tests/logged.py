"""What each logger holds, read from its own files: ``{(key, step): value}``, as logged."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

from left import history

Logged = dict[tuple[str, int], float]


def from_csv(run: Path) -> Logged:
    return {
        (name, int(row["step"])): float(value)
        for row in history(run)
        for name, value in row.items()
        if name != "step" and value != ""
    }


def from_tensorboard(run: Path) -> Logged:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    names = set(events.Tags()["scalars"]) - {"hp_metric"}
    return {(name, point.step): point.value for name in names for point in events.Scalars(name)}


def wandb_records(path: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    return [json.loads(line) for line in subprocess.check_output(command, text=True).splitlines()]


def from_wandb(run: Path) -> Logged:
    logged: Logged = {}
    for path in sorted(run.glob("wandb/offline-run-*/run-*.wandb")):
        for record in wandb_records(path):
            if record["type"] == "history":
                item = record["history"]["item"]
                step = item.pop("trainer/global_step")
                logged |= {(k, step): v for k, v in item.items() if is_metric(k, v)}
    return logged


def is_metric(name: str, value: Any) -> bool:
    return not name.startswith("_") and not isinstance(value, dict)


def mlflow_runs(store: Path) -> dict[str, tuple[str, str]]:
    """Name -> id and status."""
    with sqlite3.connect(store) as database:
        rows = database.execute("select name, run_uuid, status from runs").fetchall()
    assert len({name for name, *_ in rows}) == len(rows)
    return {name: (run, status) for name, run, status in rows}


def from_mlflow(store: Path, name: str) -> Logged:
    run, _ = mlflow_runs(store)[name]
    with sqlite3.connect(store) as database:
        rows = database.execute(
            "select key, step, value from metrics where run_uuid = ?", (run,)
        ).fetchall()
    logged = {(key, step): value for key, step, value in rows}
    assert len(logged) == len(rows), "no step twice"
    return logged
