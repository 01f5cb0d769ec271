"""A SLURM cluster on this machine: Debian's daemons, two virtual nodes, a fresh state directory."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PREFIX = ROOT / "build" / "slurm"
"""Where ``scripts/fetch-slurm.sh`` unpacks the packages."""
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={state}/munge.socket,cred_expire=5
CryptoType=crypto/munge
PluginDir={plugins}
StateSaveLocation={state}/ctld
SlurmdSpoolDir={state}/spool.%n
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/slurmd.%n.pid
SlurmctldLogFile={state}/slurmctld.log
SlurmdLogFile={state}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait=10
SchedulerParameters=batch_sched_delay=0,sched_interval=2
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why there can be no cluster here; None when there can."""
    if not (PREFIX / "usr/bin/srun").exists():
        return "needs SLURM's packages in build/slurm: scripts/fetch-slurm.sh gets them"
    if os.geteuid() != 0:
        return "needs root: SLURM's daemons start jobs as other users"
    return None


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    state = Path(tempfile.mkdtemp(prefix="slurm-"))
    state.chmod(0o755)  # munge demands it; pytest's directories are private
    cluster = Cluster(state)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
    shutil.rmtree(state)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A working directory with the project's files, where jobs write."""
    for name in ("train.py", "conf", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


class Cluster:
    """Started by `start`; `environment` is what its commands need."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.daemons: list[subprocess.Popen[bytes]] = []
        libraries = PREFIX / "usr/lib/x86_64-linux-gnu"
        self.plugins = libraries / "slurm-wlm"
        python = Path(sys.executable).parent
        paths = [PREFIX / "usr/bin", PREFIX / "usr/sbin", python, os.environ["PATH"]]
        slurm = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        self.environment = slurm | {
            "PATH": os.pathsep.join(map(str, paths)),
            "LD_LIBRARY_PATH": f"{libraries}{os.pathsep}{self.plugins}",
            "SLURM_CONF": str(state / "slurm.conf"),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
            "MASTER_ADDR": "127.0.0.1",  # the virtual nodes' names are known to SLURM alone
        }

    def start(self) -> None:
        self._configure()
        key = self.state / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{name}={self.state}/munge.{end}" for name, end in files.items()]
        self._daemon("munged", "--foreground", f"--key-file={key}", *options)
        _until((self.state / "munge.socket").exists, "munged's socket")
        self._daemon("slurmctld-wlm", "-D", "-c", "-i")
        stepd = PREFIX / "usr/sbin/slurmstepd-wlm"
        for node in ("n1", "n2"):
            self._daemon("slurmd-wlm", "-D", "-N", node, "-d", str(stepd))
        _until(
            lambda: self.run("sinfo", "-h", "-o", "%T %D").stdout == "idle 2\n", "two idle nodes"
        )

    def _configure(self) -> None:
        ports = _free_ports(3)
        first = _free_pair()
        text = CONFIG.format(
            host=socket.gethostname().partition(".")[0],
            port=ports[0],
            state=self.state,
            plugins=self.plugins,
            first=first,
            last=first + 1,
        )
        (self.state / "slurm.conf").write_text(text)
        for name in ("ctld", "spool.n1", "spool.n2"):
            (self.state / name).mkdir()

    def _daemon(self, name: str, *arguments: str) -> None:
        with (self.state / f"{name}.out").open("ab") as out:
            daemon = subprocess.Popen(
                [name, *arguments], env=self.environment, stdout=out, stderr=out
            )
        self.daemons.append(daemon)

    def run(
        self, *command: str, cwd: Path | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=timeout
        )

    def stop(self) -> None:
        """Once no job is left: daemons that are told to stop before that outlive it."""
        if len(self.daemons) == 4:
            self.run("scancel", "--user=root")
            _until(lambda: not self.run("squeue", "-h").stdout, "an empty queue")
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def states(self, job: str) -> str:
        return self.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").stdout.strip()

    def wait(self, job: str, output: Path, timeout: float = 100) -> None:
        """Until a job, with its requeued runs, has left the queue."""
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", ""}
        try:
            _until(lambda: set(self.states(job).split("\n")) <= ended, f"job {job}", timeout)
        except TimeoutError as late:
            late.add_note(self.run("scontrol", "show", "job", job).stdout)
            late.add_note(output.read_text() if output.exists() else "no output")
            raise


def _until(condition: Callable[[], bool], what: str, timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout} s for {what}")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _free_pair() -> int:
    """A port that is free, as is the one after it."""
    while True:
        first = _free_ports(1)[0]
        try:
            socket.create_server(("127.0.0.1", first + 1)).close()
        except OSError:
            continue
        return first
