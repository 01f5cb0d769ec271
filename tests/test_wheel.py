"""The wheel holds all that a run needs: it trains where there is no clone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DDP2, ROOT

from lockstep.results import read_result


@pytest.mark.slow
@pytest.mark.processes
def test_the_wheel_trains_without_the_clone(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    for command in (
        ["wheel", str(ROOT), "--no-deps", "--no-build-isolation", "-w", str(tmp_path / "dist")],
        ["install", "--no-deps", "--target", str(tmp_path / "site"), "--find-links"],
    ):
        wheel = [str(path) for path in (tmp_path / "dist").glob("*.whl")]
        last = [str(tmp_path / "dist"), *wheel] if command[0] == "install" else []
        subprocess.run([*pip, *command, *last], check=True, capture_output=True, timeout=300)
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.train", *DDP2],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (path,) = work.rglob("result.json")
    result = read_result(path)
    assert result["metrics"]["test/loss"] == pytest.approx(0.147326, abs=1e-5)
    assert result["world_size"] == 2
