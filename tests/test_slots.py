"""Several jobs at once: never more than fit, the same results, and nobody left behind."""

from __future__ import annotations

import io
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL, Command, assert_no_orphans, compose_config, on, processes_in
from rich.console import Console
from rich.live import Live
from test_faults import LONG, Started

from lockstep.devices import cores
from lockstep.errors import UsageError
from lockstep.results import Result, read_result
from lockstep.slots.board import Board
from lockstep.slots.pool import Demand, NoSuchSlots, Pool, demand_of

TWO = ["-m", "hydra/launcher=slots", "hydra.launcher.slots=2"]
needs_two_cores = pytest.mark.skipif(cores() < 2, reason="needs 2 cores")


def results(directory: Path) -> dict[str, Result]:
    paths = directory.glob("multirun/*/*/*/result.json")
    return {path.parent.name: read_result(path) for path in paths}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("trainer.devices=1", Demand("cpu", 1, 1, None)),
        ("trainer.devices=3 trainer.strategy=ddp launch.threads=2", Demand("cpu", 3, 3, 2)),
        ("trainer.devices=2 trainer.strategy=dp", Demand("cpu", 2, 1, None)),
        ("trainer.devices=[0,1] trainer.strategy=ddp_spawn", Demand("cpu", 2, 2, None)),
        ("debug=profile", Demand("cpu", 1, 1, None)),
    ],
)
def test_a_job_asks_for_its_devices(tmp_path: Path, keys: str, expected: Demand) -> None:
    config = compose_config(keys.split(), tmp_path, sweep=True)
    assert demand_of(config, {"CUDA_VISIBLE_DEVICES": ""}) == expected


@pytest.mark.parametrize(
    ("demand", "slots"),
    [
        (Demand("cpu", 1, 1, None), 1),
        (Demand("cpu", 2, 2, 4), 2),
        (Demand("cpu", 2, 2, 6), 3),
        (Demand("cpu", 1, 1, 9), 3),
        (Demand("gpu", 2, 2, 64), 2),
    ],
)
def test_more_threads_than_its_slots_have_take_more_slots(demand: Demand, slots: int) -> None:
    assert demand.slots(threads_per_slot=4) == slots


def test_jobs_take_free_slots_and_give_them_back() -> None:
    pool = Pool("gpu", "auto", {"CUDA_VISIBLE_DEVICES": "2,5,11"})
    one, two = Demand("gpu", 1, 1, None), Demand("gpu", 2, 2, None)
    assert pool.take(two) == ["2", "5"]
    assert pool.take(two) is None
    assert pool.take(one) == ["11"]
    assert pool.take(one) is None
    pool.give_back(["11"])
    pool.give_back(["2", "5"])
    assert pool.free == ["2", "5", "11"]
    assert pool.environment(["5", "11"], two)["CUDA_VISIBLE_DEVICES"] == "5,11"


def test_gpus_that_are_not_there_are_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.devices.driver_gpus", lambda: 2)
    names = {"CUDA_VISIBLE_DEVICES": "1,0,7,-1,GPU-8a"}
    assert Pool("gpu", "auto", names).free == ["1", "0", "GPU-8a"]


@pytest.mark.parametrize(
    ("slots", "demand", "threads"),
    [
        (4, Demand("cpu", 1, 1, None), 4),
        (4, Demand("cpu", 2, 2, None), 4),
        (4, Demand("cpu", 2, 1, None), 8),
        (16, Demand("cpu", 3, 3, None), 1),
    ],
)
def test_threads_match_the_slots(
    monkeypatch: pytest.MonkeyPatch, slots: int, demand: Demand, threads: int
) -> None:
    for module in ("devices", "slots.pool"):
        monkeypatch.setattr(f"lockstep.{module}.cores", lambda: 16)
    for given, expected in (("", threads), ("64", threads), ("1", 1), ("3,1", min(3, threads))):
        pool = Pool("cpu", slots, {"OMP_NUM_THREADS": given})
        taken = pool.take(demand)
        assert taken is not None
        assert pool.environment(taken, demand) == {"OMP_NUM_THREADS": str(expected)}


@pytest.mark.parametrize("asked", [0, -1, 10_000, "two", None, True, 1.5])
def test_slots_that_there_cannot_be_are_refused(asked: Any) -> None:
    rule = rf"slots must be from 1 to {cores()}, the CPU cores .* or auto; got {asked!r}"
    with pytest.raises(NoSuchSlots, match=rule):
        Pool("cpu", asked)


def test_a_job_that_never_fits_is_refused() -> None:
    with pytest.raises(UsageError, match=r"fit the 2 slots .* this one needs 3 .*devices=3"):
        Pool("gpu", 2, {"CUDA_VISIBLE_DEVICES": "0,1"}).take(Demand("gpu", 3, 3, None))


def test_a_table_shows_what_runs_and_how_long_it_will_take() -> None:
    board = Board(total=9)
    board.slots = 2
    board.live = Live(console=Console(file=io.StringIO(), force_terminal=True, width=100))
    assert board.left_s() is None
    for number in range(3):
        board.started(number, f"x=[{number}]", ["0"])
    board.running[0].started -= 10
    board.ended(0, "x=[0]", None, Path("none"))
    board.ended(1, "x=[1]", "it broke", Path("none"))
    board.ended(7, "x=[7]", "refused", Path("none"))
    left = board.left_s()
    assert left is not None
    assert abs(left - (5 * 10 + 10) / 2) < 1, "five wait, one has just begun"
    assert board.counts() == ("1 running, 5 waiting, 1 finished, 2 failed, about 30 s left"), (
        "and it says so"
    )
    console = Console(file=io.StringIO(), width=100)
    console.print(board.table())
    assert re.search(r"#2 +0 +0 +x=\[2\]", console.file.getvalue())


def most_at_once(output: str) -> int:
    """Slots in use at the busiest moment; fails when two jobs hold one slot."""
    held: dict[str, set[str]] = {}
    most = 0
    for line in output.splitlines():
        if started := re.search(r"#(\d+) started on slots? ([\d,]+):", line):
            slots = set(started[2].split(","))
            assert not slots & set().union(*held.values()), line
            held[started[1]] = slots
            most = max(most, sum(map(len, held.values())))
        elif ended := re.search(r"#(\d+) \w+.* after [\d.]+ s;", line):
            del held[ended[1]]
    assert not held
    return most


def test_a_system_that_cannot_fork_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra_plugins.lockstep.slots import SlotsLauncher

    launcher = SlotsLauncher()
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(UsageError, match="needs a system that can fork"):
        launcher.launch([["seed=1"]], 0)


@pytest.mark.processes
@needs_two_cores
def test_jobs_at_once_fit_the_slots_and_compute_the_same(train: Command) -> None:
    jobs_of_all_sizes = ["trainer.strategy=dp,ddp", "trainer.devices=1,2", "seed=1,2"]
    done = train(*TWO, *SMALL, *jobs_of_all_sizes, env={"OMP_NUM_THREADS": ""})
    assert done.returncode == 0, done.stderr
    assert most_at_once(done.stdout) == 2
    jobs = results(done.directory)
    assert {job["status"] for job in jobs.values()} == {"finished"}
    assert len(jobs) == 8
    for seed in (1, 2):
        losses = [job["metrics"]["test/loss"] for job in jobs.values() if job["seed"] == seed]
        assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)
    per_slot = cores() // 2
    for job in jobs.values():
        shared = job["devices"] // job["world_size"]
        assert job["threads_per_process"] == per_slot * shared, job["overrides"]
    pids = [pid for job in jobs.values() for pid in job["pids"]]
    assert len(set(pids)) == len(pids) == 10, "fresh processes for every job"
    last = done.stdout.strip().splitlines()
    assert re.match(r"sweep .*: 8 finished", last[-9])
    console = next(done.directory.glob("multirun/*/*/0/console.log")).read_text()
    assert "dp: 1 process x 8 samples" in console
    assert "dp: 1 process" not in done.stdout, "jobs do not write between each other's lines"


@pytest.mark.processes
@needs_two_cores
def test_what_breaks_is_a_row_and_the_others_go_on(train: Command) -> None:
    """A refused job, one that fails, one whose host is killed, one that never fits, a good one."""
    breaks = "callbacks.break.how=SIGKILL_HOST,raise"
    done = train(*TWO, *SMALL, "callbacks=breaking", "callbacks.break.batch=0", breaks, "seed=1,-1")
    assert done.returncode == 1
    jobs = results(done.directory)
    errors = {name: job["error"] for name, job in jobs.items()}
    assert (
        errors["0"]
        == "the process that hosted this job was ended by SIGKILL; console.log may tell more"
    )
    assert errors["1"] == errors["3"]
    assert errors["1"].startswith("seed must be 0 or greater")
    assert errors["2"] == "rank 0: RuntimeError: broken on purpose"
    assert "4 failed" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr

    done = train(*TWO, *SMALL, "trainer.devices=5,1")
    assert done.returncode == 1
    newest = max(done.directory.glob("multirun/*/*"), key=lambda path: path.stat().st_mtime)
    big, small = (read_result(newest / name / "result.json") for name in "01")
    assert "this one needs 5" in big["error"]
    assert small["status"] == "finished"


@pytest.mark.processes
def test_a_wrong_number_of_slots_starts_nothing(train: Command) -> None:
    done = train("-m", "hydra/launcher=slots", "hydra.launcher.slots=0", *SMALL, "seed=1,2")
    assert done.returncode == 1
    assert "error: hydra.launcher.slots must be from 1 to" in done.stderr
    assert not results(done.directory)


@pytest.mark.processes
@needs_two_cores
def test_an_interrupted_sweep_goes_on_over_slots(train: Command, tmp_path: Path) -> None:
    sweep = [*TWO, *SMALL, "callbacks=breaking"]
    first = train(*sweep, "callbacks.break.batch=99,1,98")
    assert first.returncode == 1
    before = results(tmp_path)
    assert before["1"]["status"] == "interrupted"
    again = train(*sweep, "callbacks.break.batch=99,1,98", "sweep.resume=latest")
    assert again.returncode == 0, again.stderr
    after = results(tmp_path)
    assert after["0"] == before["0"]
    assert after["1"]["resumed_from"].endswith("/1/checkpoints/interrupted.ckpt")
    assert [after[name]["status"] for name in "012"] == ["finished"] * 3


@pytest.mark.processes
def test_finished_jobs_are_skipped_though_they_would_not_fit(train: Command) -> None:
    sweep = [*SMALL, *on("dp", 3), "seed=1"]
    assert train("-m", *sweep).returncode == 0
    one = ["hydra/launcher=slots", "hydra.launcher.slots=1"]
    again = train("-m", *one, *sweep, "sweep.resume=latest")
    assert again.returncode == 0, again.stderr
    assert list(results(again.directory)) == ["0"]


@pytest.mark.processes
def test_a_job_may_change_into_its_directory(train: Command) -> None:
    done = train("-m", "hydra/launcher=slots", *SMALL, "seed=1", "hydra.job.chdir=true")
    assert done.returncode == 0, done.stderr
    (job,) = results(done.directory).values()
    assert job["status"] == "finished"
    assert len(list(done.directory.glob("multirun/*/*/0/console.log"))) == 1


@pytest.mark.processes
@needs_two_cores
def test_jobs_that_run_again_at_once_get_directories_of_their_own(
    train: Command, tmp_path: Path
) -> None:
    sweep = [*TWO, *SMALL, "seed=1,2"]
    assert train(*sweep).returncode == 0
    for path in tmp_path.glob("multirun/*/*/*/result.json"):
        path.write_text(path.read_text().replace('"code": ', '"code": "other", "before": '))
    again = train(*sweep, "sweep.resume=latest")
    assert again.returncode == 0, again.stderr
    jobs = results(again.directory)
    assert sorted(jobs) == ["0", "1", "2", "3"]
    assert [jobs[name]["seed"] for name in "0123"] == [1, 2, 1, 2]


@pytest.mark.processes
@needs_two_cores
@pytest.mark.parametrize(
    ("number", "whole_group", "status"),
    [
        (signal.SIGINT, True, 130),
        (signal.SIGTERM, False, 143),
        pytest.param(signal.SIGINT, False, 130, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_all_jobs_which_save(
    tmp_path: Path, number: int, whole_group: bool, status: int
) -> None:
    run = Started(tmp_path, "hydra.mode=MULTIRUN", *TWO[1:], *LONG, "seed=1,2,3")
    for job in (0, 1):
        run.wait_for(f"multirun/*/*/{job}/checkpoints/last.ckpt")
    (os.killpg if whole_group else os.kill)(run.process.pid, number)
    code, last = run.ends()
    assert code == status
    jobs = results(tmp_path)
    assert [jobs[name]["status"] for name in "01"] == ["interrupted"] * 2
    for name in "01":
        assert list(tmp_path.glob(f"multirun/*/*/{name}/checkpoints/interrupted.ckpt"))
    assert last.startswith("  #2  not started")


@pytest.mark.processes
@needs_two_cores
def test_nobody_outlives_a_launching_process_that_was_killed(tmp_path: Path) -> None:
    run = Started(tmp_path, "hydra.mode=MULTIRUN", *TWO[1:], *LONG, "seed=1,2,3")
    for job in (0, 1):
        run.wait_for(f"multirun/*/*/{job}/checkpoints/last.ckpt")
    assert len(processes_in(str(tmp_path))) > 4
    run.process.kill()
    run.process.wait()
    assert_no_orphans(str(tmp_path), within_s=15)
    jobs = results(tmp_path)
    assert [jobs[name]["status"] for name in "01"] == ["interrupted"] * 2
