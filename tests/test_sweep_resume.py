"""A sweep that was interrupted goes on: nothing is done twice, nothing is left out."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from conftest import DDP2, SMALL, Command
from omegaconf import OmegaConf
from recording import global_batches

from lockstep.results import Result, read_result
from lockstep.rundir import config_digest, job_directory, sweep_directory

pytestmark = pytest.mark.processes

BREAKING = ["callbacks=breaking", *DDP2]
SWEEP = ["-m", *SMALL, *BREAKING]
JOBS = "callbacks.break.batch=99,3,98"
"""The second one is stopped by a signal to one of its ranks."""


def jobs_of(directory: Path) -> dict[str, Result]:
    return {path.parent.name: read_result(path) for path in directory.glob("*/result.json")}


def test_finished_jobs_are_skipped_and_the_others_done(train: Command, tmp_path: Path) -> None:
    first = train(*SWEEP, JOBS)
    assert first.returncode == 143, first.stderr
    assert re.search(r"#2  not started .*callbacks\.break\.batch=98", first.stdout)
    (sweep,) = tmp_path.glob("multirun/*/*")
    before = jobs_of(sweep)
    assert [before[name]["status"] for name in "01"] == ["finished", "interrupted"]

    again = train(*SWEEP, "callbacks.break.batch=97,98,3,99", "sweep.resume=latest")
    assert again.returncode == 0, again.stderr
    assert list(tmp_path.glob("multirun/*/*")) == [sweep]
    after = jobs_of(sweep)
    assert after["0"] == before["0"], "a finished job is not run again"
    assert f"finished before in {sweep / '0'}: skipped" in again.stdout
    assert after["1"]["resumed_from"] == str(sweep / "1" / "checkpoints" / "interrupted.ckpt")
    assert [result["status"] for result in after.values()] == ["finished"] * 4
    breaks = [
        item for result in after.values() for item in result["overrides"] if "break.batch" in item
    ]
    assert sorted(item.rpartition("=")[2] for item in breaks) == ["3", "97", "98", "99"]
    batches = [global_batches(sweep / name) for name in after]
    assert all(each == batches[0] for each in batches), "no sample twice, none left out"


@pytest.mark.slow
def test_a_finished_job_runs_again_when_the_code_has_changed(
    train: Command, tmp_path: Path
) -> None:
    assert train("-m", *SMALL, "seed=1").returncode == 0
    (path,) = tmp_path.glob("multirun/*/*/0/result.json")
    path.write_text(path.read_text().replace('"code": ', '"code": "other", "before": '))
    assert train("-m", *SMALL, "seed=1", "sweep.resume=latest").returncode == 0
    assert sorted(jobs_of(path.parents[1])) == ["0", "1"]


def test_what_cannot_go_on_is_refused(train: Command) -> None:
    for arguments, words in (
        (
            ["-m", "seed=1,2", "sweep.resume=latest"],
            "sweep.resume=latest needs a sweep in multirun/",
        ),
        (["-m", "seed=1,2", "sweep.resume=nowhere"], "there is no nowhere"),
        (["sweep.resume=latest"], "add -m and the sweep's overrides"),
        (["-m", "seed=1,2", "resume=latest"], "resume goes on with one run"),
    ):
        done = (
            train(*SMALL, *arguments)
            if arguments[0] != "-m"
            else train("-m", *SMALL, *arguments[1:])
        )
        assert done.returncode == 1
        assert words in done.stderr + done.stdout
        assert "Traceback" not in done.stderr


def test_the_latest_sweep_is_the_latest_though_its_jobs_were_refused(tmp_path: Path) -> None:
    for number, name in enumerate(("trained", "refused")):
        result = tmp_path / "today" / name / "0" / "result.json"
        result.parent.mkdir(parents=True)
        result.write_text("{}")
        os.utime(result, (number, number))
    config = tmp_path / "today/trained/0/.hydra/config.yaml"
    config.parent.mkdir()
    config.touch()
    assert sweep_directory(str(tmp_path), "latest") == str(tmp_path / "today/refused")


def test_a_directory_that_was_given_to_a_job_is_given_to_no_other(tmp_path: Path) -> None:
    """Of jobs at once, one asks for its directory before the other has written to its own."""
    hydra = {"job": {"num": 0}, "sweep": {"dir": str(tmp_path)}}
    config = OmegaConf.create({"hydra": hydra, "sweep": {"resume": "latest"}})
    digest = config_digest(config)
    done = {"status": "finished", "code": "other", "config_digest": digest}
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "result.json").write_text(json.dumps(done))
    assert job_directory(_root_=config) == "1"
    (tmp_path / "1").mkdir()
    assert job_directory(_root_=config) == "2"
