"""What hangs on the core can be deleted, folder by folder, and the core goes on as before."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

OPTIONAL = [
    "report",
    "slots",
    "search",
    "parity",
    "use",
    "workloads",
    "features",
    "find",
    "pictures",
    "doctor",
    "slurm_sweep",
    "modelparallel",
]
LEFT_OUT = (".venv", ".git", ".*_cache", "__pycache__", "outputs", "multirun", "*.egg-info")
SWEEP = ["-m", "trainer.strategy=dp,ddp,ddp_spawn", "trainer.devices=2", "trainer.max_epochs=1"]


def copy_without(rooms: list[str], into: Path) -> Path:
    """The project without these rooms, and without the plugin and the YAML files that name them."""
    project = shutil.copytree(
        ROOT, into / "project", ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True
    )
    source = project / "src"
    for room in rooms:
        shutil.rmtree(source / "lockstep" / room)
        (source / "hydra_plugins" / "lockstep" / f"{room}.py").unlink(missing_ok=True)
        for path in (project / "conf").rglob("*.yaml"):
            if f"lockstep.{room}" in path.read_text():
                path.unlink()
    return project


def run(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(project / "src")}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=project, env=clean, capture_output=True, text=True, timeout=300
    )


def results(project: Path) -> list[dict[str, Any]]:
    paths = sorted((project / "multirun").rglob("result.json"))
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.processes
@pytest.mark.parametrize(
    "rooms",
    [
        pytest.param(OPTIONAL, id="all"),
        *(pytest.param([room], id=room, marks=pytest.mark.slow) for room in OPTIONAL),
    ],
)
def test_the_core_trains_and_sweeps_without(tmp_path: Path, rooms: list[str]) -> None:
    project = copy_without(rooms, tmp_path)
    where = run(project, "-c", "import lockstep; print(lockstep.__file__)").stdout
    assert Path(where.strip()).is_relative_to(project), "the copy is what is tested"
    done = run(project, "train.py", *SWEEP)
    assert done.returncode == 0, done.stderr
    assert "3 finished" in done.stdout
    assert ("report:" in done.stdout) == ("report" not in rooms)
    assert "could not" not in done.stdout
    found = results(project)
    assert {job["strategy"] for job in found} == {"dp", "ddp", "ddp_spawn"}
    losses = [job["metrics"]["test/loss"] for job in found]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    core = ["tests/test_sharding.py", "tests/test_build.py", "tests/test_placement.py"]
    tested = run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", *core)
    assert tested.returncode == 0, tested.stdout[-3000:]
