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
from conftest import TEST_CONF, Launch
from omegaconf import OmegaConf
from slurm_cluster import Cluster, why_not
from test_resume import RUN, STEPS, assert_same_run, break_at, weights

from lockstep.errors import UsageError
from lockstep.results import read_result
from lockstep.slurm_sweep.queue import ENDED
from lockstep.slurm_sweep.shape import Shape, check_options, shape_of
from lockstep.slurm_sweep.submit import parameters

CLUSTER = [
    pytest.mark.slurm,
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
DDP_2 = ["trainer.strategy=ddp", "trainer.devices=2"]
DEFAULTS: dict[str, Any] = {
    "partition": None,
    "account": None,
    "qos": None,
    "timeout_min": 240,
    "signal_delay_s": 90,
    "cpus_per_task": None,
    "gpus_per_node": None,
    "mem_gb": None,
    "array_parallelism": 256,
    "setup": None,
    "options": {},
}


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
        assert launch(*RUN, *DDP_2, directory=directory)["steps"] == STEPS
    return directory


class TestOnACluster:
    pytestmark = CLUSTER

    @pytest.fixture(autouse=True)
    def _no_job_is_left_to_the_next_test(self, cluster: Cluster) -> Iterator[None]:
        yield
        cluster.run("scancel", "--user=root")
        until(lambda: not queued(cluster))

    def test_jobs_of_a_sweep_are_slurm_jobs_with_the_results_of_a_local_sweep(
        self, cluster: Cluster, project: Path, reference: Path
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
        self, cluster: Cluster, project: Path, reference: Path
    ) -> None:
        sweep = [*SWEEP, *RUN, *DDP_2, breaking("scancel", "SIGKILL", "never")]
        first = cluster.run(*sweep, cwd=project, timeout=300)
        assert first.returncode == 1
        lines = closing(first.stdout)
        assert lines[0].endswith("1 failed, 2 finished"), first.stdout + first.stderr
        assert [line.split()[1] for line in lines[1:]] == ["finished", "failed", "finished"]
        (directory,) = project.glob("multirun/*/*")
        killed = read_result(directory / "1" / "result.json")["error"]
        assert re.match(
            r"SLURM ended job \d+_1 \((FAILED|no longer known)\); .*_1_0_log\.out", killed
        )
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
        for name, weight in weights(reference).items():
            assert (
                weights(directory / "1")[name].sub(weight).abs().max() <= 1e-6 * weight.abs().max()
            )

    def test_a_cancelled_job_is_interrupted_and_ctrl_c_cancels_the_others(
        self, cluster: Cluster, project: Path
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

    def test_what_slurm_does_not_take_is_one_error(self, cluster: Cluster, project: Path) -> None:
        done = cluster.run(
            *SWEEP, *RUN, "hydra.launcher.partition=nowhere", cwd=project, timeout=300
        )
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


def composed(**trainer: Any) -> Any:
    defaults = {"strategy": "auto", "devices": 1, "num_nodes": 1, "accelerator": "cpu"}
    return OmegaConf.create({"trainer": defaults | trainer})


@pytest.mark.parametrize(
    ("trainer", "launcher", "expected"),
    [
        ({}, {}, Shape(1, 1, 0)),
        ({"strategy": "dp", "devices": 2}, {}, Shape(1, 1, 0)),
        ({"strategy": "ddp_spawn", "devices": 2}, {}, Shape(1, 1, 0)),
        ({"strategy": "ddp", "devices": "2"}, {}, Shape(1, 2, 0)),
        ({"devices": 2}, {}, Shape(1, 2, 0)),
        ({"devices": 4, "num_nodes": 2, "accelerator": "gpu"}, {}, Shape(2, 4, 4)),
        ({"strategy": "dp", "devices": 2, "accelerator": "cuda"}, {}, Shape(1, 1, 2)),
        ({"devices": 2, "accelerator": "auto"}, {"gpus_per_node": 2}, Shape(1, 2, 2)),
        ({"devices": 2, "accelerator": "gpu"}, {"options": {"gres": "gpu:2"}}, Shape(1, 2, 0)),
    ],
)
def test_nodes_tasks_and_gpus_follow_from_the_config(
    trainer: dict[str, Any], launcher: dict[str, Any], expected: Shape
) -> None:
    assert shape_of(composed(**trainer), DEFAULTS | launcher) == expected


@pytest.mark.parametrize(
    ("trainer", "launcher", "words"),
    [
        ({"devices": "auto"}, {}, ["must be their number; got auto", "trainer.devices=2"]),
        ({"devices": [0, 1]}, {}, ["got [0, 1]"]),
        ({"strategy": "dpp"}, {}, ["got 'dpp'. Did you mean dp?"]),
        ({"strategy": "dp", "num_nodes": 2}, {}, ["works on one machine", "num_nodes=2"]),
        (
            {"devices": 4, "accelerator": "gpu"},
            {"gpus_per_node": 2},
            ["gpus_per_node must be at least trainer.devices; got 2 and 4"],
        ),
    ],
)
def test_a_run_that_no_allocation_fits_is_refused_before_it_is_submitted(
    trainer: dict[str, Any], launcher: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UsageError) as refused:
        shape_of(composed(**trainer), DEFAULTS | launcher)
    for word in words:
        assert word in str(refused.value)


def test_options_cannot_contradict_what_follows_from_the_config() -> None:
    check_options({"constraint": "a100"})
    with pytest.raises(UsageError, match=r"must leave ntasks-per-node out.*trainer\.devices"):
        check_options({"ntasks-per-node": 3})


def test_sbatch_is_told_the_shape_the_notice_and_further_options() -> None:
    from submitit.slurm.slurm import _make_sbatch_string

    launcher = DEFAULTS | {"mem_gb": 8, "cpus_per_task": 3, "options": {"constraint": "a100"}}
    given = parameters(Shape(2, 4, 4), launcher)
    assert given["srun_args"] == ["--kill-on-bad-exit=1", "--cpus-per-task=3"]
    assert (given["time"], given["mem"]) == (240, "8192M")
    script = _make_sbatch_string("run", "logs", **given)
    wanted = ["nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "signal=SIGUSR1@90", "requeue"]
    for option in [*wanted, "constraint=a100"]:
        assert f"#SBATCH --{option}" in script.splitlines()
