"""``python train.py``, as a user types it: what it prints, leaves behind and exits with."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml
from conftest import (
    DDP2,
    ROOT,
    SMALL,
    TEST_CONF,
    TRAIN,
    Command,
    assert_no_orphans,
    environment,
    on,
    quick_and_slow,
)
from left import checkpoint
from recording import global_batches, rows
from test_faults import LONG, WITHIN_S, Started

from lockstep.results import read_result
from lockstep.summary import closing_block

pytestmark = pytest.mark.processes


def directories(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob("**/result.json"))


AUTO_AND_SLOW_DDP2 = [
    pytest.param([], id="auto"),
    pytest.param(DDP2, id="ddp", marks=pytest.mark.slow),
]


def test_the_sweep_of_six_gives_six_equal_results(train: Command) -> None:
    done = train(
        "-m",
        *SMALL,
        "callbacks=recording",
        "trainer.strategy=dp,ddp,ddp_spawn",
        "trainer.devices=1,2",
    )
    assert done.returncode == 0, done.stderr
    runs = directories(done.directory)
    assert [run.name for run in runs] == ["0", "1", "2", "3", "4", "5"]
    assert len({run.parent for run in runs}) == 1, "one sweep directory"
    assert not (done.directory / "outputs").exists()
    pids = [pid for result in done.results for pid in result["pids"]]
    assert len(pids) == len(set(pids)) == 1 + 1 + 1 + 2 + 1 + 2
    first = global_batches(runs[0])
    for run, result in zip(runs, done.results, strict=True):
        assert result["status"] == "finished"
        assert result["samples_seen"] == {"train": 64, "val": 33, "test": 33}
        assert global_batches(run) == first
        assert result["metrics"]["test/loss"] == pytest.approx(
            done.results[0]["metrics"]["test/loss"], rel=1e-6
        )
    lines = done.stdout.splitlines()
    assert any(line.endswith(": 6 finished") for line in lines)
    closing = [line for line in lines if line.startswith("  #")]
    assert len(closing) == 6
    assert "trainer.strategy=ddp trainer.devices=2" in closing[3]


@pytest.mark.slow
def test_devices_may_shrink_within_a_sweep(train: Command) -> None:
    done = train("-m", *SMALL, "trainer.strategy=ddp,ddp_spawn", "trainer.devices=2,1")
    assert done.returncode == 0, done.stderr
    assert [result["world_size"] for result in done.results] == [2, 1, 2, 1]
    assert all(result["samples_seen"]["test"] == 33 for result in done.results)


def test_a_failing_job_is_listed_and_the_others_run(train: Command) -> None:
    done = train("-m", *SMALL, *DDP2, "model=failing", "model.fail.rank=0", "model.fail.step=1,99")
    assert done.returncode == 1
    failed, good = done.results
    assert failed["status"] == "failed"
    assert failed["error"] == "rank 0: RuntimeError: broken on purpose"
    assert good["status"] == "finished"
    assert ": 1 failed, 1 finished" in done.stdout
    runs = directories(done.directory)
    log = (runs[0] / "train.log").read_text()
    assert "broken on purpose" in log
    assert "Traceback" in log
    assert "Traceback" not in (runs[1] / "train.log").read_text()


@pytest.mark.slow
def test_a_refused_job_is_recorded_too(train: Command) -> None:
    done = train("-m", *SMALL, *DDP2, "data.global_batch_size=7,8")
    assert done.returncode == 1
    assert [result["status"] for result in done.results] == ["failed", "finished"]
    assert "Use 6 or 8" in done.results[0]["error"]
    logs = [(run / "train.log").read_text() for run in directories(done.directory)]
    assert "Use 6 or 8" in logs[0], "the job's own log tells it, at once"
    assert "Use 6 or 8" not in logs[1]


def test_the_objective_goes_back_to_the_sweeper(tmp_path: Path) -> None:
    code = (
        "import runpy, sys, lockstep.cli;"
        "run, values = lockstep.cli.run, [];"
        "lockstep.cli.run = lambda config: values.append(run(config)) or values[-1];"
        f"sys.argv[0] = {str(ROOT / 'train.py')!r};"
        "runpy.run_path(sys.argv[0], run_name='__main__');"
        "print('objectives:', values)"
    )
    command = [
        sys.executable,
        "-c",
        code,
        "-m",
        "--config-dir",
        str(TEST_CONF),
        *SMALL,
        "objective=val/loss,null",
    ]
    env = environment({"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"})
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = [read_result(run / "result.json") for run in directories(tmp_path)]
    value = results[0]["metrics"]["val/loss"]
    assert f"objectives: [{value!r}, None]" in done.stdout


def test_an_unknown_objective_lists_the_metrics_and_keeps_them(train: Command) -> None:
    done = train(*SMALL, "objective=test/los")
    assert done.returncode == 1
    assert "got 'test/los'. There are: train/loss, val/loss, test/loss" in done.stderr
    (result,) = done.results
    assert result["status"] == "failed"
    assert set(result["metrics"]) == {"train/loss", "val/loss", "test/loss"}


def test_a_run_prints_one_line_per_phase_and_a_closing_block(train: Command) -> None:
    done = train(*SMALL, *DDP2)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    opening, epoch, finished, *block = done.stdout.splitlines()
    assert "ddp: 2 processes x 4 samples (global batch 8), cpu, lr 1e-06, seed 0" in opening
    assert "epoch 1/1  step 8  train/loss" in epoch
    assert finished.endswith("finished")
    names = [line.split()[0] for line in block]
    assert names == [
        "strategy",
        "batch",
        "trained",
        "time",
        "speed",
        "best",
        "train/loss",
        "val/loss",
        "test/loss",
        "directory",
    ]
    assert "\x1b" not in done.stdout, "plain text when it is no terminal"
    assert block[0].endswith("ddp, 2 processes, 2 devices (cpu)")
    on_two_hosts = closing_block({**done.results[0], "num_nodes": 2, "world_size": 4})
    assert "ddp, 4 processes, 4 devices (cpu)" in on_two_hosts


def test_a_run_leaves_one_directory_with_these_files(train: Command) -> None:
    done = train(*SMALL, *DDP2)
    (run,) = directories(done.directory)
    files = sorted(path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file())
    assert files == [
        ".hydra/config.yaml",
        ".hydra/overrides.yaml",
        "checkpoints/epoch000-step000008.ckpt",
        "checkpoints/last.ckpt",
        "metrics.csv",
        "result.json",
        "train.log",
    ]
    log = (run / "train.log").read_text()
    assert log.count("epoch 1/1") == 1


def test_result_json_tells_what_was_run(train: Command) -> None:
    (result,) = train(*SMALL, *DDP2, "seed=7", "trainer.accumulate_grad_batches=2").results
    expected = {
        "status": "finished",
        "error": None,
        "strategy": "ddp",
        "accelerator": "cpu",
        "devices": 2,
        "num_nodes": 1,
        "world_size": 2,
        "global_batch_size": 8,
        "per_process_batch_size": 4,
        "accumulate_grad_batches": 2,
        "seed": 7,
        "epochs": 1,
        "steps": 4,
    }
    assert {key: result[key] for key in expected} == expected
    assert len(result["peak_memory_bytes"]) == 2
    assert all(50e6 < peak < 4e9 for peak in result["peak_memory_bytes"])
    assert 0 < result["time_to_first_step_s"] < result["wall_time_s"]
    assert result["samples_per_second"] > 0
    assert set(result["versions"]) == {"torch", "lightning"}


def test_the_written_config_runs_again_with_the_same_result(train: Command, tmp_path: Path) -> None:
    first = train(*SMALL, "seed=null", "optimizer.lr=1e-4")
    (run,) = directories(first.directory)
    (before,) = first.results
    config = yaml.safe_load((run / ".hydra" / "config.yaml").read_text())
    assert config["seed"] == before["seed"], "a drawn seed is stored"
    written = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    stored = ["--config-dir", str(run / ".hydra"), "--config-name", "config"]  # the last one counts
    again = train(*stored, *DDP2, "hydra.run.dir=again")
    assert again.returncode == 0, again.stderr
    after = read_result(tmp_path / "again" / "result.json")
    for name, value in before["metrics"].items():
        assert after["metrics"][name] == pytest.approx(value, rel=1e-6)
    assert {path: path.read_bytes() for path in written} == written, "the first run is untouched"
    assert (tmp_path / "again" / "checkpoints" / "last.ckpt").exists()


@pytest.mark.slow
def test_odd_directory_names_work(train: Command) -> None:
    for name in ("a b/lr=0.1,bs=[8]", 'quo"te'):
        done = train(*SMALL, *DDP2, f"hydra.run.dir='{name}'")
        assert done.returncode == 0, done.stderr
        assert (done.directory / name / "result.json").exists()


@pytest.mark.slow
def test_added_and_removed_keys_reach_every_rank(train: Command) -> None:
    done = train(*SMALL, *DDP2, "+notes.why=hello", "+notes.values=[1,2]", "~callbacks.epoch_line")
    assert done.returncode == 0, done.stderr
    (result,) = done.results
    assert result["notes"] == {"why": "hello", "values": [1, 2]}
    assert "epoch 1/1" not in done.stdout


def test_torchrun_ranks_share_one_directory_and_one_log(train: Command) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = train(*SMALL, *DDP2, "callbacks=recording", launcher=launcher)
    assert done.returncode == 0, done.stderr
    (run,) = directories(done.directory)
    (result,) = done.results
    assert result["samples_seen"] == {"train": 64, "val": 33, "test": 33}
    assert (run / "train.log").read_text().count("epoch 1/1") == 1
    assert len(global_batches(run)) == 8


@pytest.mark.slow
def test_a_port_in_use_does_not_matter(train: Command) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for strategy in ("ddp", "ddp_spawn"):
            done = train(
                *SMALL,
                *on(strategy),
                env={"MASTER_PORT": port},
            )
            assert done.returncode == 0, done.stderr


RECORDED = [*LONG, "callbacks=recording"]
PLACES = {"auto": on("auto", 1), "ddp": DDP2, "ddp_spawn": on("ddp_spawn")}
PLACES["sweep"] = [*DDP2, "seed=1,2", "-m"]
STATUS = {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 143}
SIGNALLED = [
    *((where, "parent") for where in ("auto", "ddp", "ddp_spawn", "sweep")),
    *((where, "group") for where in ("auto", "ddp", "sweep")),
    *((where, "parent and group") for where in ("auto", "ddp")),  # as coreutils' timeout does
    ("ddp", "rank 0"),
    ("ddp", "rank 1"),
    ("ddp_spawn", "rank 1"),
    ("sweep", "rank 1"),
]
SIGNALS = [(name, where, to) for name in STATUS for where, to in SIGNALLED]
QUICK_SIGNALS = [
    ("SIGTERM", "auto", "parent"),
    ("SIGINT", "ddp", "parent"),
    ("SIGINT", "ddp", "parent and group"),
    ("SIGUSR1", "ddp", "rank 1"),
    ("SIGTERM", "ddp_spawn", "parent"),
    ("SIGTERM", "sweep", "group"),
]


@pytest.mark.parametrize(
    ("name", "where", "to"), quick_and_slow(SIGNALS, QUICK_SIGNALS), ids=lambda value: value
)
def test_a_signal_saves_a_checkpoint_and_ends_the_run_with_its_status(
    tmp_path: Path, name: str, where: str, to: str
) -> None:
    sent = getattr(signal, name)
    started = Started(tmp_path, *RECORDED, *PLACES[where])
    started.wait_for(f"**/seen-{0 if where == 'auto' else 1}.jsonl")
    if to.startswith("parent"):
        os.kill(started.process.pid, sent)
        time.sleep(0.01)  # or the kernel makes one of two
    if to.endswith("group"):
        os.killpg(started.process.pid, sent)
    if to.startswith("rank"):
        os.kill(int((tmp_path / f"started-{to[-1]}").read_text()), sent)
    status, _ = started.ends()
    text = started.text()
    assert status == STATUS[name], text
    (run,) = directories(tmp_path)  # of a sweep, the second job is not started
    assert read_result(run / "result.json")["status"] == "interrupted"
    if where == "sweep":
        assert re.search(r"^  #1  not started  .* seed=2$", text, re.MULTILINE)
    step = checkpoint(run, "interrupted")["global_step"]
    assert step > 0
    trained = Counter(row["rank"] for row in rows(run) if row["stage"] == "train")
    assert trained == dict.fromkeys(range(1 if where == "auto" else 2), step), "at the same step"
    assert f"stopped before step {step}; saved" in text
    assert "Traceback" not in text
    assert "death signal" not in text, "torch's words for the same"


def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path) -> None:
    long = [f"+model.seconds={2 * WITHIN_S}", "launch.grace_s=60"]
    run = Started(tmp_path, *LONG, *DDP2, *long)
    run.wait_for("started-1")
    os.kill(run.process.pid, signal.SIGINT)
    time.sleep(1)
    assert run.process.poll() is None, "the first one waits for the step to end"
    os.kill(run.process.pid, signal.SIGINT)
    status, _ = run.ends()  # within half of a step
    assert status == 130, run.text()


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("ddp_spawn", marks=pytest.mark.slow)])
def test_ranks_end_when_the_launching_process_is_killed(tmp_path: Path, strategy: str) -> None:
    run = Started(tmp_path, *RECORDED, *PLACES[strategy])
    run.wait_for("**/seen-1.jsonl")
    run.process.kill()
    run.process.wait()
    assert_no_orphans(str(tmp_path), within_s=15)


@pytest.mark.slow
def test_thirty_small_ddp_runs_all_exit_with_zero(train: Command) -> None:
    done = train("-m", *SMALL, *DDP2, "seed=range(30)", timeout=240)
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr
    assert [result["status"] for result in done.results] == ["finished"] * 30


BAR = ["trainer.enable_progress_bar=true"]


@pytest.mark.parametrize("arguments", [DDP2, ["-m", "seed=1,2"], BAR], ids=["ddp", "sweep", "bar"])
def test_a_run_whose_reader_leaves_goes_on_and_says_nothing(
    tmp_path: Path, arguments: list[str]
) -> None:
    with subprocess.Popen(
        [sys.executable, *TRAIN, *arguments, *SMALL],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == ("", 0)
    statuses = [read_result(path)["status"] for path in tmp_path.rglob("result.json")]
    assert statuses == ["finished"] * (2 if "-m" in arguments else 1)
    assert all("finished" in path.read_text() for path in tmp_path.rglob("train.log"))


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_shows_a_bar_and_whole_log_lines(tmp_path: Path) -> None:
    import pty

    command = [sys.executable, *TRAIN, *SMALL, *DDP2, "model._target_=recording.SleepingModule"]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=theirs, stderr=subprocess.STDOUT
    )
    os.close(theirs)
    text = b""
    try:
        while chunk := os.read(ours, 4096):
            text += chunk
    except OSError:  # Linux: the other end is closed
        pass
    assert process.wait(timeout=60) == 0
    os.close(ours)
    shown = text.decode()
    assert "epoch 1/1 [" in shown
    lines = [line.rpartition("\r\x1b[2K")[2] for line in shown.replace("\r\n", "\n").split("\n")]
    assert any("epoch 1/1  step 8  train/loss" in line and "[" not in line for line in lines)
    assert "  strategy    ddp, 2 processes, 2 devices (cpu)" in lines


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
@pytest.mark.parametrize("where", AUTO_AND_SLOW_DDP2)
def test_a_full_disk_is_told_and_what_was_written_is_kept(tmp_path: Path, where: list[str]) -> None:
    import resource

    overrides = [*SMALL, *where, "model=mlp", "model.network.width=128"]
    limit = 30_000  # bytes a file: the log and the result fit, a checkpoint does not
    done = subprocess.run(
        [sys.executable, *TRAIN, *overrides],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "cannot be written: File too large. What was written before is kept." in last
    (run,) = directories(tmp_path)
    assert read_result(run / "result.json")["status"] == "failed"
    assert (run / ".hydra" / "config.yaml").exists()
    assert_no_orphans(str(tmp_path))


@pytest.mark.parametrize("where", AUTO_AND_SLOW_DDP2)
def test_fast_dev_run_is_one_batch_and_leaves_no_checkpoint(
    train: Command, where: list[str]
) -> None:
    done = train("debug=fast_dev_run", *where)
    assert done.returncode == 0, done.stderr
    (result,) = done.results
    assert (result["steps"], result["samples_seen"]["train"]) == (1, 128)
    (run,) = directories(done.directory)
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize("where", AUTO_AND_SLOW_DDP2)
def test_overfit_learns_two_batches_by_heart(train: Command, where: list[str]) -> None:
    done = train("debug=overfit", *where)
    assert done.returncode == 0, done.stderr
    (result,) = done.results
    assert result["steps"] == 200
    assert result["samples_seen"]["train"] == 256
    assert result["metrics"]["train/loss"] < 0.05, "below the noise of 0.09"


@pytest.mark.slow
def test_profile_writes_where_the_time_went(train: Command) -> None:
    done = train("debug=profile", *DDP2)
    assert done.returncode == 0, done.stderr
    (run,) = directories(done.directory)
    for rank in (0, 1):
        assert "run_training_batch" in (run / f"fit-profile-{rank}.txt").read_text()
