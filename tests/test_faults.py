"""What breaks, how soon the run ends, what it says, and that nobody is left."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import (
    DDP2,
    SMALL,
    TRAIN,
    Command,
    assert_no_orphans,
    environment,
    on,
    processes_in,
    quick_and_slow,
)
from left import checkpoint

from lockstep.errors import as_usage_error
from lockstep.failures import end_left_behind
from lockstep.results import read_result

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals"),
]
WITHIN_S = 15.0
"""From fault to exit; 5 s on a machine that does nothing else."""


class Started:
    """A run in its own session, whose output is read from a file while it runs."""

    def __init__(self, directory: Path, *overrides: str) -> None:
        self.directory, self.log = directory, directory / "output"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *TRAIN, *SMALL, *overrides],
                cwd=directory,
                env=environment(),
                start_new_session=True,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + 60
        while not list(self.directory.glob(pattern)):
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, f"no {pattern} after 60 s"
            time.sleep(0.02)

    def ends(self) -> tuple[int, str]:
        """Exit status and last line, if that comes soon enough and leaves no process behind."""
        started = time.monotonic()
        try:
            status = self.process.wait(timeout=60)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        seconds = time.monotonic() - started
        assert seconds < WITHIN_S, f"{seconds:.1f} s from fault to exit"
        assert_no_orphans(str(self.directory))
        return status, self.text().strip().splitlines()[-1]

    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text()

    def error(self) -> str:
        (path,) = self.directory.glob("**/result.json")
        result = read_result(path)
        assert result["status"] == "failed"
        return str(result["error"])


LONG = ["model._target_=recording.SleepingModule", "trainer.max_epochs=99"]


PHASES = [
    (phase, rank, strategy)
    for phase in ("setup", "step", "validation")
    for rank in (0, 1)
    for strategy in ("ddp", "ddp_spawn")
]
QUICK_PHASES = [("setup", 1, "ddp"), ("step", 0, "ddp_spawn"), ("validation", 1, "ddp")]


@pytest.mark.parametrize(("phase", "rank", "strategy"), quick_and_slow(PHASES, QUICK_PHASES))
def test_an_exception_ends_all_ranks_while_the_other_is_busy(
    tmp_path: Path, phase: str, rank: int, strategy: str
) -> None:
    where = on(strategy)
    run = Started(tmp_path, *where, "model=faulty", f"model.phase={phase}", f"model.rank={rank}")
    run.wait_for("fault")
    status, line = run.ends()
    assert status == 1
    assert line == f"failed: rank {rank}: RuntimeError: broken in {phase}"
    assert run.text().count("Traceback (most recent call last)") == 1
    assert run.error() == f"rank {rank}: RuntimeError: broken in {phase}"


@pytest.mark.parametrize(
    "where",
    [pytest.param([], id="auto"), pytest.param(DDP2, id="ddp", marks=pytest.mark.slow)],
)
def test_an_exception_in_a_data_worker_names_the_sample(tmp_path: Path, where: list[str]) -> None:
    run = Started(tmp_path, *where, "data=faulty", "callbacks=unmonitored", "objective=null")
    assert run.process.wait(timeout=90) == 1
    status, line = run.ends()
    assert status == 1
    assert line.startswith("failed: ")
    assert line.endswith("ValueError: sample 21 cannot be read")


def test_a_killed_fork_server_ends_the_run(tmp_path: Path) -> None:
    run = Started(tmp_path, *DDP2, *LONG)
    run.wait_for("started-1")
    servers = [
        process["pid"]
        for process in processes_in(str(tmp_path))
        if "multiprocessing.forkserver" in " ".join(process["cmdline"] or [])
        and process["ppid"] == run.process.pid
    ]
    ranks = [int((tmp_path / f"started-{rank}").read_text()) for rank in (0, 1)]
    (server,) = set(servers) - set(ranks)
    os.kill(server, signal.SIGKILL)
    status, line = run.ends()
    assert status == 1
    assert line == "failed: the fork server that the run's processes came from is gone (killed?)"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_the_system_kills_for_memory_is_named(tmp_path: Path, rank: int) -> None:
    run = Started(tmp_path, *DDP2, *LONG)
    run.wait_for("started-1")
    os.kill(int((tmp_path / f"started-{rank}").read_text()), signal.SIGKILL)
    status, line = run.ends()
    assert status == 1
    assert line == f"failed: rank {rank} was ended by SIGKILL (is the machine out of memory?)"


@pytest.mark.parametrize(
    "where",
    [pytest.param([], id="auto", marks=pytest.mark.slow), pytest.param(DDP2, id="ddp")],
)
def test_a_disk_that_fills_up_while_saving_leaves_the_previous_checkpoint(
    tmp_path: Path, train: Command, where: list[str]
) -> None:
    """The limit on a file's size is lowered after the first epoch's checkpoint."""
    run = Started(
        tmp_path,
        *where,
        "trainer.max_epochs=4",
        "model=mlp",
        "model.network.width=128",
        "+callbacks.full={_target_: faults.FullDisk, after_epoch: 1, limit: 30000}",
    )
    assert run.process.wait(timeout=60) == 1
    last = run.text().strip().splitlines()[-1]
    assert re.search(r"error: .*ckpt.* cannot be written: File too large\.", last), last
    (directory,) = (path.parent for path in tmp_path.glob("outputs/*/*/result.json"))
    assert checkpoint(directory)["epoch"] == 0
    assert not list(directory.glob("**/*.tmp"))
    again = train("resume=latest", "+callbacks.full=null")
    assert again.returncode == 0, again.stderr
    assert read_result(directory / "result.json")["epochs"] == 4


def test_a_file_that_may_not_be_opened_is_not_said_to_be_written() -> None:
    denied = as_usage_error(PermissionError(errno.EACCES, "Permission denied", "data.npy"))
    assert str(denied).startswith("data.npy cannot be read or written: Permission denied.")
    full = as_usage_error(OSError(errno.ENOSPC, "No space left on device", "last.ckpt"))
    assert str(full).startswith("last.ckpt cannot be written: No space left on device.")


def test_on_windows_no_rank_is_sent_a_signal_that_it_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (tmp_path / "rank0.pid").write_text(str(child.pid))
    with monkeypatch.context() as windows:
        windows.setattr(sys, "platform", "win32")
        windows.delattr(signal, "SIGKILL")
        end_left_behind(tmp_path)
    assert child.poll() is None
    end_left_behind(tmp_path)
    assert child.wait() == -signal.SIGKILL
    assert child.stdin is not None
    child.stdin.close()
