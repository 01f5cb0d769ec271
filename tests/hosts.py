"""Several hosts on one machine: network namespaces on a switch, each with a name and an address."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from conftest import TRAIN, environment, on

INTERFACE = "lsh0"
PORT = 29400


def missing() -> str | None:
    """Why no hosts can be made here; None where they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux, for network namespaces"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs ip and unshare: apt-get install iproute2 util-linux"
    probe = f"lsh-{os.getpid()}-probe"
    made = ip("netns", "add", probe, check=False)
    if made.returncode != 0:
        return f"needs network namespaces: {made.stderr.strip()}"
    ip("netns", "del", probe)
    return None


def ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


@dataclass
class Host:
    number: int
    namespace: str
    switch: str
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"host{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number + 1}"

    @property
    def port(self) -> str:
        """Its end of the cable at the switch."""
        return f"lshp{self.number}"

    def start(
        self, command: list[str], cwd: Path, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """A command on this host, in a session of its own; its output goes to ``<name>.out``."""
        inside = ["unshare", "--uts", "sh", "-c", f'hostname {self.name}; exec "$@"', "sh"]
        settings = {"GLOO_SOCKET_IFNAME": INTERFACE, **(env or {})}
        with (cwd / f"{self.name}.out").open("w") as out:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *inside, *command],
                cwd=cwd,
                env=environment(settings),
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def pids(self) -> list[int]:
        """Every process that lives in this host's network."""
        return [int(pid) for pid in ip("netns", "pids", self.namespace).stdout.split()]

    def kill(self) -> None:
        """As power that fails: every process at once."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)

    def cut(self) -> None:
        """Pull the cable, at the switch."""
        ip("-n", self.switch, "link", "set", self.port, "down")


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """``count`` hosts on one switch, and nothing else that they can reach."""
    switch = f"lsh-{os.getpid()}-switch"
    made = [Host(i, f"lsh-{os.getpid()}-{i}", switch) for i in range(count)]
    names = [switch, *(host.namespace for host in made)]
    etc = [Path("/etc/netns") / host.namespace for host in made]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", switch, "link", "add", "lshbr", "type", "bridge")
        ip("-n", switch, "link", "set", "lshbr", "up")
        table = "127.0.0.1 localhost\n" + "".join(f"{h.address} {h.name}\n" for h in made)
        for host, folder in zip(made, etc, strict=True):
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(table)  # `ip netns exec` mounts it over /etc/hosts
            _plug_in(host)
        yield made
    finally:
        for host in made:
            if (Path("/run/netns") / host.namespace).exists():
                host.kill()
            for process in host.processes:
                process.wait(10)
        for name in names:
            ip("netns", "del", name, check=False)
        for folder in etc:
            shutil.rmtree(folder, ignore_errors=True)


def _plug_in(host: Host) -> None:
    peer = ["peer", "name", INTERFACE, "netns", host.namespace]
    ip("-n", host.switch, "link", "add", host.port, "type", "veth", *peer)
    ip("-n", host.switch, "link", "set", host.port, "master", "lshbr", "up")
    ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
    ip("-n", host.namespace, "link", "set", INTERFACE, "up")
    ip("-n", host.namespace, "link", "set", "lo", "up")
    # The agent of a host that is cut off waits for as long as the kernel sends again: 15 minutes.
    ip("netns", "exec", host.namespace, "sysctl", "-qw", "net.ipv4.tcp_retries2=3")


def finish(started: list[subprocess.Popen[str]], within_s: float = 120) -> list[int]:
    deadline = time.monotonic() + within_s
    return [process.wait(max(0.1, deadline - time.monotonic())) for process in started]


def output(directory: Path, number: int) -> str:
    return (directory / f"host{number}.out").read_text()


def torchrun(
    host: Host, nnodes: int, *overrides: str, options: tuple[str, ...] = (), per_host: int = 2
) -> list[str]:
    """torchrun's command on ``host``; all meet at host 0, whose agent is told so."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={nnodes}",
        f"--nproc-per-node={per_host}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=10.77.0.1:{PORT}",
        f"--rdzv-conf=is_host={int(host.number == 0)},read_timeout=5",
        f"--local-addr={host.address}",
        *options,
        *TRAIN,
        *overrides,
    ]


def launch_script(host: Host, nnodes: int, *overrides: str) -> list[str]:
    """The older command, whose rendezvous is static."""
    return [
        *(sys.executable, "-m", "torch.distributed.launch"),
        f"--nnodes={nnodes}",
        f"--node-rank={host.number}",
        "--nproc-per-node=2",
        "--master-addr=10.77.0.1",
        f"--master-port={PORT}",
        *TRAIN,
        *overrides,
    ]


def where(nnodes: int, per_host: int = 2) -> list[str]:
    return [*on("ddp", per_host), f"trainer.num_nodes={nnodes}"]
