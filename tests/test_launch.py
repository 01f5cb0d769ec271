"""Processes: who runs, what they share, and how they end."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import DDP2, SMALL, Command, Launch, assert_no_orphans, on, quick_and_slow
from left import checkpoint
from omegaconf import OmegaConf
from recording import rows

from lockstep.errors import RunFailed, UsageError
from lockstep.results import read_result

pytestmark = pytest.mark.processes


def test_a_single_run_of_one_process_happens_in_this_process(launch: Launch) -> None:
    for strategy in ("auto", "dp"):
        assert launch(*SMALL, f"trainer.strategy={strategy}")["pids"] == [os.getpid()]


def test_a_sweep_job_never_runs_in_this_process(launch: Launch) -> None:
    pids = [
        launch(*SMALL, f"trainer.strategy={strategy}", sweep=True)["pids"]
        for strategy in ("auto", "dp", "ddp", "ddp_spawn")
    ]
    together = [pid for group in pids for pid in group]
    assert os.getpid() not in together
    assert len(set(together)) == len(together) == 4


@pytest.mark.parametrize("strategy", ["auto", "dp", "ddp", "ddp_spawn"])
@pytest.mark.parametrize("devices", [1, 2])
def test_threads_are_those_that_were_asked_for(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, strategy: str, devices: int
) -> None:
    """Lightning's launcher shares the cores out once more, after this project has."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    where = [*on(strategy, devices), "launch.threads=3"]
    assert launch(*SMALL, *where, sweep=True)["threads_per_process"] == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch(*SMALL, *where[:2], sweep=True)["threads_per_process"] == 3


PARENT_OF_A_SWEEP = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    heavy = {"torch", "lightning", "torchmetrics", "wandb"} & sys.modules.keys()
    print("loaded:", sorted(heavy))
"""


@pytest.mark.parametrize("launcher", ["basic", "slots"])
def test_the_process_that_launches_a_sweep_stays_small(train: Command, launcher: str) -> None:
    """It would otherwise hold half a gigabyte, and load it while the first job's result waits."""
    sweep = ["-m", f"hydra/launcher={launcher}", *SMALL, "seed=1,2"]
    done = train(*sweep, launcher=[sys.executable, "-c", PARENT_OF_A_SWEEP])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_a_sweep_keeps_no_configs_in_memory() -> None:
    from hydra.core.utils import JobReturn

    from lockstep.sweep import RememberSweep

    job = JobReturn(cfg=OmegaConf.create(), hydra_cfg=OmegaConf.create())
    RememberSweep().on_job_end(config=OmegaConf.create(), job_return=job)
    assert (job.cfg, job.hydra_cfg) == (None, None)


def test_jobs_with_any_mix_of_strategies_and_devices_follow_each_other(launch: Launch) -> None:
    for strategy, devices in (
        ("ddp", 2),
        ("ddp", 1),
        ("ddp_spawn", 2),
        ("dp", 2),
        ("ddp", 2),
        ("ddp_spawn", 1),
        ("auto", 1),
    ):
        where = on(strategy, devices)
        result = launch(*SMALL, *where, sweep=True)
        assert result["samples_seen"] == {"train": 64, "val": 33, "test": 33}, where
        assert len(result["pids"]) == result["world_size"], where


def test_threads_and_learning_rate_are_those_of_the_job(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    for job, (devices, rate) in enumerate([(1, 1e-6), (2, 2e-6), (1, 3e-6)]):
        directory = tmp_path / str(job)
        where = [*on("ddp", devices), f"optimizer.lr={rate}"]
        launch(*SMALL, "callbacks=recording", *where, sweep=True, directory=directory)
        seen = [row for row in rows(directory) if row["stage"] == "train"]
        assert {row["rank"] for row in seen} == set(range(devices))
        assert {row["lr"] for row in seen} == {rate}
        shared = max(1, (os.cpu_count() or 1) // devices)
        assert {row["threads"] for row in seen} == {shared if devices > 1 else torch_threads()}


def torch_threads() -> int:
    """What a fresh process has without OMP_NUM_THREADS."""
    import subprocess
    import sys

    command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return int(subprocess.check_output(command, env=environ))


@pytest.mark.parametrize(
    ("strategy", "sweep"),
    quick_and_slow(
        [(name, sweep) for name in ("auto", "dp", "ddp", "ddp_spawn") for sweep in (False, True)],
        [("auto", False), ("dp", True), ("ddp", False), ("ddp_spawn", True)],
    ),
)
def test_an_exception_is_recorded_and_the_next_run_is_good(
    launch: Launch, tmp_path: Path, strategy: str, sweep: bool, caplog: pytest.LogCaptureFixture
) -> None:
    devices = 1 if strategy == "auto" else 2
    rank = 0 if strategy in ("auto", "dp") else 1
    where = on(strategy, devices)
    directory = tmp_path / "broken"
    with pytest.raises(RunFailed, match="broken on purpose"):
        launch(
            *SMALL,
            "model=failing",
            f"model.fail.rank={rank}",
            *where,
            sweep=sweep,
            directory=directory,
        )
    result = read_result(directory / "result.json")
    assert result["status"] == "failed"
    assert "RuntimeError: broken on purpose" in result["error"]
    tracebacks = [text for text in caplog.messages if "Traceback" in text]
    assert len(tracebacks) == 1
    assert tracebacks[0].rstrip().endswith("RuntimeError: broken on purpose")
    assert launch(*SMALL, *where, sweep=sweep)["status"] == "finished"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("how", "words"),
    [("kill", "was ended by SIGKILL"), ("exit", "left with exit status 7")],
)
def test_a_rank_that_dies_is_named_as_the_cause(
    launch: Launch, tmp_path: Path, rank: int, how: str, words: str
) -> None:
    with pytest.raises(RunFailed, match=f"rank {rank} {words}"):
        launch(
            *SMALL,
            "model=failing",
            f"model.fail.rank={rank}",
            f"model.fail.how={how}",
            *DDP2,
            directory=tmp_path / "broken",
        )
    assert f"rank {rank} {words}" in read_result(tmp_path / "broken" / "result.json")["error"]


def test_a_busy_rank_leaves_in_order_soon_after_the_other_failed(
    launch: Launch, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    started = time.monotonic()
    with pytest.raises(RunFailed, match="rank 1: RuntimeError: broken on purpose"):
        launch(
            *SMALL,
            "model=failing",
            "model.fail.rank=1",
            "+model.fail.busy_s=60",
            f"+model.fail.marker={marker}",
            *DDP2,
        )
    assert time.monotonic() - started < 30, "the busy rank was waited for"
    assert marker.read_text() == "left in order", "its finally block has run"


def test_a_rank_that_stops_answering_ends_the_run_within_the_timeout(launch: Launch) -> None:
    with pytest.raises(RunFailed, match=r"rank 1: .*[Tt]imed out"):
        launch(
            *SMALL,
            "model=failing",
            "model.fail.rank=1",
            "model.fail.step=-1",
            "+strategy.options.bucket_cap_mb=1",
            "strategy.timeout_s=3",
            "data=indexed",
            "callbacks=recording",
            "+callbacks.stall={_target_: faults.StallRank0}",
            *DDP2,
        )


def test_a_lambda_in_the_module_is_named_under_ddp_spawn(launch: Launch) -> None:
    run = [*SMALL, "model._target_=recording.LambdaModule"]
    with pytest.raises(UsageError, match=r"module\.activation cannot be pickled"):
        launch(*run, *on("ddp_spawn"))
    assert launch(*run, *DDP2)["status"] == "finished"


@pytest.mark.parametrize("strategy", ["auto", "dp", "ddp", "ddp_spawn"])
def test_a_nan_loss_stops_at_its_step_and_keeps_the_last_good_state(
    launch: Launch, tmp_path: Path, strategy: str
) -> None:
    devices = 1 if strategy == "auto" else 2
    where = on(strategy, devices)
    # Sample 41 is in batch 5 (of 8 samples, not shuffled); of two ranks, the second has it.
    rank = 1 if strategy.startswith("ddp") else 0
    with pytest.raises(UsageError, match=f"got nan at step 5 .epoch 0. on rank {rank}"):
        launch(
            "data=with_nan",
            "model=linear",
            "optimizer=sgd",
            "optimizer.lr=1e-6",
            *where,
            directory=tmp_path / "nan",
        )
    saved = checkpoint(tmp_path / "nan", "last_good")
    assert saved["global_step"] == 5
    finite = [
        torch.isfinite(value).all()
        for value in saved["state_dict"].values()
        if value.is_floating_point()
    ]
    assert all(finite)


def test_an_empty_data_set_is_refused(launch: Launch) -> None:
    for where in ([], DDP2):
        with pytest.raises(UsageError, match="train data set must hold at least one sample; got 0"):
            launch("data=indexed", "data.datasets.train=0", "model=linear", *where)


def test_ranks_that_joined_with_another_config_are_refused(launch: Launch) -> None:
    with pytest.raises(UsageError, match=r"those of ranks \[1\] differ from rank 0's"):
        launch(
            *SMALL,
            "+notes={where: '${oc.env:RANK,none}'}",
            "+callbacks.mix={_target_: faults.ChangeDigestOnRank1}",
            *DDP2,
        )


def test_fork_server_and_ranks_end_with_the_command(train: Command, tmp_path: Path) -> None:
    done = train(*SMALL, *DDP2)
    assert done.returncode == 0, done.stderr
    assert_no_orphans(str(tmp_path), within_s=0.5)


def test_a_batch_larger_than_the_data_is_one_batch_of_all_said_once(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    result = launch(*SMALL, "data.global_batch_size=1000")
    assert (result["steps"], result["global_batch_size"]) == (1, 64)
    said = [text for text in caplog.messages if "one batch of all" in text]
    assert said == [
        "data.global_batch_size is 1000, the training set holds 64 samples: one batch of all"
    ]


def test_an_open_file_in_the_module_is_named_under_ddp_spawn(launch: Launch) -> None:
    with pytest.raises(UsageError, match=r"module\.handle cannot be pickled"):
        launch(*SMALL, "model._target_=recording.OpenFileModule", *on("ddp_spawn"))


def test_a_nan_in_a_module_of_ones_own_stops_too(launch: Launch) -> None:
    with pytest.raises(UsageError, match="training loss must be finite; got nan at step 5"):
        launch(
            "data=with_nan",
            "model=linear",
            "model._target_=recording.OwnStep",
            "optimizer=sgd",
            "optimizer.lr=1e-6",
        )


DRAWN = ["model=linear", "model.network.out_features=3", "optimizer=sgd", "callbacks=unmonitored"]
SHORT = ["trainer.max_epochs=1", "objective=train/loss", "data.num_workers=1"]


def test_a_data_set_that_loader_processes_cannot_get_is_named(launch: Launch) -> None:
    words = r"by pickle, which failed with .*'Unpicklable.__init__.<locals>.<lambda>'"
    data = ["data=drawing", "data.datasets._target_=recording.unpicklable"]
    with pytest.raises(UsageError, match=words):
        launch(*data, *DRAWN, *SHORT, *DDP2)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("ddp_spawn", marks=pytest.mark.slow)])
def test_loader_processes_of_a_rank_share_one_import_of_torch(
    launch: Launch, strategy: str
) -> None:
    where = on(strategy)
    result = launch("data=parents", *DRAWN, *SHORT, "data.num_workers=2", *where)
    parents = [path.read_text() for path in Path(result["directory"]).glob("parent-*.txt")]
    assert len(parents) == 4
    assert all("forkserver" in text and "lockstep.forkserver" in text for text in parents)
