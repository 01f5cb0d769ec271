"""Sweeps that cannot be good: each says so, and loses nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from conftest import ROOT, SMALL, Command
from test_slots import needs_two_cores, results

pytestmark = pytest.mark.processes
ONE_BY_ONE = ["-m"]
AT_ONCE = ["-m", "hydra/launcher=slots", "hydra.launcher.slots=2"]
LAUNCHERS = [ONE_BY_ONE, pytest.param(AT_ONCE, marks=needs_two_cores)]


@pytest.mark.parametrize("sweep", LAUNCHERS, ids=["one by one", "at once"])
def test_two_jobs_of_one_directory_do_not_touch_each_other(
    train: Command, sweep: list[str]
) -> None:
    done = train(*sweep, *SMALL, "seed=1,2", "hydra.sweep.subdir=same")
    assert done.returncode == 1
    (job,) = results(done.directory).values()
    assert (job["status"], job["error"]) == ("finished", None)
    assert re.search(r"(A run is writing to|must not hold another run)", done.stderr)
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("sweep", LAUNCHERS, ids=["one by one", "at once"])
def test_a_job_that_dies_at_import_is_a_row_and_the_others_go_on(
    train: Command, tmp_path: Path, sweep: list[str]
) -> None:
    (tmp_path / "raises_at_import.py").write_text("raise OSError('no such card')")
    (tmp_path / "leaves_at_import.py").write_text("import os; os._exit(3)")
    modules = "raises_at_import.A,leaves_at_import.B,lockstep.module.SupervisedModule"
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "tests")])
    done = train(*sweep, *SMALL, f"model._target_={modules}", env={"PYTHONPATH": paths})
    assert done.returncode == 1
    jobs = results(done.directory)
    assert [jobs[name]["status"] for name in "012"] == ["failed", "failed", "finished"]
    assert "OSError: no such card" in jobs["0"]["error"]
    assert jobs["1"]["error"] == "rank 0 left with exit status 3 in the middle of the run"
    assert "1 finished" in done.stdout
    assert "2 failed" in done.stdout


@pytest.mark.parametrize("launcher", ["basic", "slots"])
def test_a_sweep_without_a_job_is_an_error(train: Command, launcher: str) -> None:
    done = train("-m", f"hydra/launcher={launcher}", "seed=range(0)", "trainer.max_epochs=1")
    assert done.returncode == 1
    rule = "error: a sweep must have at least one job; got none from seed=range(0) trainer"
    assert done.stderr.startswith(rule)
