"""Jobs of a real SLURM: who makes the processes, the time limit's notice, exit statuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import DDP2, TEST_CONF, Launch
from faults import break_at
from left import assert_weights_equal, weights
from slurm_cluster import Cluster, why_not
from test_resume import RUN, STEPS, assert_same_run

from lockstep.results import read_result

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.processes,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
SETTINGS = f"hydra.searchpath=[file://{TEST_CONF}]"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole") / "run"


@pytest.fixture
def reference(launch: Launch, whole: Path) -> Path:
    """The same run without SLURM, in two processes of ours, that nothing happened to."""
    if not whole.exists():
        assert launch(*RUN, *DDP2, directory=whole)["steps"] == STEPS
    return whole


def submit(cluster: Cluster, project: Path, *command: str) -> tuple[str, str]:
    """The job's number, and what it wrote once it has left the queue for good."""
    done = cluster.run("sbatch", "--parsable", *command, cwd=project)
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    cluster.wait(job, project / f"slurm-{job}.out")
    return job, (project / f"slurm-{job}.out").read_text()


def test_a_requeued_job_goes_on_in_its_directory_and_ends_with_the_uninterrupted_weights(
    cluster: Cluster, project: Path, reference: Path
) -> None:
    notice = break_at(1, 2, "scancel")
    job, output = submit(cluster, project, "scripts/train.slurm", SETTINGS, *RUN, notice)

    run = project / "outputs" / "slurm" / f"{job}.0"
    assert [path.parent for path in project.glob("outputs/**/result.json")] == [run], output
    result = read_result(run / "result.json")
    assert result["status"] == "finished", output
    assert result["resumed_from"] == str(run / "checkpoints" / "interrupted.ckpt")
    assert result["world_size"] == 2
    assert_same_run(run, reference)
    assert_weights_equal(weights(run), weights(reference), tolerance=0)
    log = (run / "train.log").read_text()
    assert log.count(f"requeued job {job}") == 1
    assert log.count("resuming from") == 1
    assert log.count("2 processes x 6 samples") == 2
    details = cluster.run("scontrol", "show", "job", job).stdout
    assert "Restarts=1" in details
    assert "JobState=COMPLETED" in details
    assert "ExitCode=0:0" in details


def test_tasks_on_two_nodes_are_the_ranks_of_one_run(
    cluster: Cluster, project: Path, reference: Path
) -> None:
    two = ["trainer.strategy=ddp", "trainer.num_nodes=2", "trainer.devices=1"]
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", "python", "train.py", SETTINGS]
    done = cluster.run(*command, *RUN, *two, cwd=project)
    assert done.returncode == 0, done.stderr
    (run,) = project.glob("outputs/slurm/*")
    assert read_result(run / "result.json")["world_size"] == 2
    assert_same_run(run, reference)
    assert_weights_equal(weights(run), weights(reference), tolerance=0)
    assert "warn" not in done.stderr.lower()


def test_an_interactive_allocation_with_srun_is_one_run_and_its_exit_status_tells(
    cluster: Cluster, project: Path, reference: Path
) -> None:
    train = ["srun", "python", "train.py", SETTINGS, *RUN, *DDP2]
    broken = break_at(0, 1, rank=1)
    script = project / "both.sh"
    good = " ".join(f"'{part}'" for part in train)
    bad = " ".join('"' + part + '"' for part in [*train[:1], "-K", *train[1:], broken])
    lines = [f"{good}; echo good $?", f"{bad}; echo bad $?"]
    script.write_text("\n".join(lines))
    done = cluster.run("salloc", "--nodes=1", "--ntasks=2", "bash", str(script), cwd=project)
    assert "good 0" in done.stdout, done.stdout + done.stderr
    assert "bad 1" in done.stdout, done.stdout + done.stderr
    first, second = sorted(project.glob("outputs/slurm/*"))
    assert_weights_equal(weights(first), weights(reference), tolerance=0)
    assert read_result(second / "result.json")["status"] == "failed"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            ["salloc", "--ntasks=1", "python", "train.py", *DDP2],
            [
                "(SLURM_STEP_ID is not set)",
                "config asks for 2",
                "--ntasks-per-node=2",
                "srun python train.py",
            ],
        ),
        (
            ["srun", "--ntasks=1", "python", "train.py", *DDP2],
            ["srun started 1", "config asks for 2", "--nodes=1 --ntasks-per-node=2"],
        ),
        (
            ["srun", "--nodes=2", "--ntasks=2", "python", "train.py", *DDP2],
            ["1(x2) per node", "trainer.devices=2 trainer.num_nodes=1"],
        ),
    ],
    ids=["salloc-without-srun", "one-task", "two-nodes"],
)
def test_an_allocation_that_does_not_fit_is_refused_with_values_and_repair(
    cluster: Cluster, project: Path, command: list[str], words: list[str]
) -> None:
    done = cluster.run(*command, cwd=project)
    assert done.returncode == 1
    for word in words:
        assert word in done.stderr
    assert not list(project.glob("**/checkpoints"))


def test_a_batch_script_without_srun_is_refused_for_two_processes_and_runs_one(
    cluster: Cluster, project: Path
) -> None:
    train = f"python train.py {SETTINGS!r} data=indexed model=linear trainer.max_epochs=1"
    (project / "two.sh").write_text(f"#!/bin/bash\n{train} {' '.join(DDP2)}; echo status $?\n")
    (project / "one.sh").write_text(f"#!/bin/bash\n{train}; echo status $?\n")
    two = submit(cluster, project, "--ntasks=1", "two.sh")[1]
    assert "put srun before the command" in two
    assert two.endswith("status 1\n")
    one = submit(cluster, project, "--ntasks=1", "one.sh")[1]
    assert one.endswith("status 0\n"), one
    results = [read_result(path) for path in project.glob("outputs/*/*/result.json")]
    assert sorted(result["status"] for result in results) == ["failed", "finished"]


def test_daemons_run_with_a_fresh_state_directory(cluster: Cluster) -> None:
    assert all(daemon.poll() is None for daemon in cluster.daemons)
    assert any((cluster.state / "ctld").iterdir())
