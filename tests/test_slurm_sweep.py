"""Sweeps whose jobs are SLURM jobs: ``hydra/launcher=slurm``."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import DDP2, TEST_CONF, Launch
from faults import break_at
from left import assert_weights_equal, weights
from slurm_cluster import Cluster, why_not
from test_resume import RUN, STEPS, assert_same_run

from lockstep.results import read_result
from lockstep.slurm_sweep.queue import ENDED

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.processes,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
SWEEP = [
    "python",
    "train.py",
    "-m",
    f"hydra.searchpath=[file://{TEST_CONF}]",
    "hydra/launcher=slurm",
    "hydra.launcher.poll_s=0.5",
]


def breaking(*how: str) -> str:
    """An override that makes one job of each way to break."""
    key, _, _ = break_at(0, 0).partition("=")
    each = [break_at(1, 2, one) if one != "never" else break_at(9, 0) for one in how]
    return f"{key}={','.join(item.partition('=')[2] for item in each)}"


def jobs_of(project: Path) -> dict[str, dict[str, Any]]:
    paths = project.glob("multirun/*/*/*/result.json")
    return {path.parent.name: read_result(path) for path in paths}


def closing(stdout: str) -> list[str]:
    """The lines from ``sweep ...`` on, without seconds."""
    lines = stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("sweep "))
    return [line.rpartition("  ")[0] if line.endswith(" s") else line for line in lines[first:]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone") / "run"


@pytest.fixture
def reference(launch: Launch, directory: Path) -> Path:
    """One job of the sweeps, without SLURM."""
    if not directory.exists():
        assert launch(*RUN, *DDP2, directory=directory)["steps"] == STEPS
    return directory


@pytest.fixture(autouse=True)
def _no_job_is_left_to_the_next_test(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.run("scancel", "--user=root")
    until(lambda: not queued(cluster))


def test_jobs_of_a_sweep_are_slurm_jobs_with_the_results_of_a_local_sweep(
    cluster: Cluster, project: Path, reference: Path
) -> None:
    where = ["trainer.strategy=dp,ddp,ddp_spawn", "trainer.devices=2,auto"]
    done = cluster.run(*SWEEP, *RUN, *where, cwd=project, timeout=300)

    found = jobs_of(project)
    assert set(found) == set("012345"), done.stderr
    (sweep,) = project.glob("multirun/*/*")
    for number, strategy in (("0", "dp"), ("2", "ddp"), ("4", "ddp_spawn")):
        job = found.pop(number)
        assert (job["status"], job["strategy"], job["devices"]) == ("finished", strategy, 2)
        assert_same_run(sweep / number, reference)
    assert {job["status"] for job in found.values()} == {"failed"}
    assert all("must be their number; got auto" in job["error"] for job in found.values())
    assert done.returncode == 1, "three of the jobs were refused"
    lines = closing(done.stdout)
    assert lines[0].endswith("3 failed, 3 finished")
    assert [line.split()[:2] for line in lines[1:]] == [
        [f"#{number}", "failed" if number % 2 else "finished"] for number in range(6)
    ]
    assert all("test/loss" in line for line in lines[1::2])
    tasks = sorted(path.name for path in (sweep / "slurm").glob("*_log.out"))
    assert len(tasks) == 4, "one of dp, one of ddp_spawn, two ranks of ddp"
    assert "report:" in done.stdout
    assert len((sweep / "report.csv").read_text().splitlines()) == 1 + 6


def test_a_job_near_its_limit_is_requeued_a_killed_one_is_listed_and_the_sweep_goes_on(
    cluster: Cluster, project: Path, reference: Path
) -> None:
    sweep = [*SWEEP, *RUN, *DDP2, breaking("scancel", "SIGKILL", "never")]
    first = cluster.run(*sweep, cwd=project, timeout=300)
    assert first.returncode == 1
    lines = closing(first.stdout)
    assert lines[0].endswith("1 failed, 2 finished"), first.stdout + first.stderr
    assert [line.split()[1] for line in lines[1:]] == ["finished", "failed", "finished"]
    (directory,) = project.glob("multirun/*/*")
    killed = read_result(directory / "1" / "result.json")["error"]
    assert re.match(r"SLURM ended job \d+_1 \((FAILED|no longer known)\); .*_1_0_log\.out", killed)
    requeued = (directory / "0" / "train.log").read_text()
    assert requeued.count("requeued job") == requeued.count("resuming from") == 1
    never = read_result(directory / "2" / "result.json")

    second = cluster.run(*sweep, "sweep.resume=latest", cwd=project, timeout=300)
    assert second.returncode == 0, second.stderr
    assert closing(second.stdout)[0].endswith("3 finished")
    assert second.stdout.count("skipped") == 2
    assert read_result(directory / "2" / "result.json") == never
    for number in ("0", "2"):
        assert_same_run(directory / number, reference)
    assert read_result(directory / "1" / "result.json")["resumed_from"] is not None
    assert_weights_equal(weights(directory / "1"), weights(reference))


def test_a_cancelled_job_is_interrupted_and_ctrl_c_cancels_the_others(
    cluster: Cluster, project: Path
) -> None:
    endless = [*RUN, "model._target_=recording.SleepingModule", "trainer.max_epochs=99"]
    command = [*SWEEP, *endless, "seed=1,2", "hydra.launcher.array_parallelism=1"]
    running = subprocess.Popen(
        command, env=cluster.environment, cwd=project, stdout=subprocess.PIPE, text=True
    )
    try:
        until(lambda: "running" in {job["status"] for job in jobs_of(project).values()})
        (first, _) = queued(cluster)
        cluster.run("scancel", first)
        until(lambda: jobs_of(project).get("1", {}).get("status") == "running")
        running.send_signal(signal.SIGINT)
        output = running.communicate(timeout=60)[0]
    finally:
        running.kill()
    assert running.returncode == 130
    until(lambda: not queued(cluster))
    results = jobs_of(project)
    assert [results[number]["status"] for number in "01"] == ["interrupted"] * 2
    assert "#0  interrupted" in output


def test_what_slurm_does_not_take_is_one_error(cluster: Cluster, project: Path) -> None:
    done = cluster.run(*SWEEP, *RUN, "hydra.launcher.partition=nowhere", cwd=project, timeout=300)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "invalid partition" in line.lower()
    assert "hydra.launcher.partition" in line
    assert "Traceback" not in done.stderr
    assert not queued(cluster)


def queued(cluster: Cluster) -> list[str]:
    """Jobs that are not over."""
    listed = cluster.run("squeue", "-h", "-r", "-o", "%i %T", "-t", "all").stdout
    jobs = [line.split() for line in listed.splitlines()]
    return sorted(name for name, state in jobs if state not in ENDED)


def until(condition: Any, timeout: float = 90) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
