"""Runs whose ranks are each in a network namespace of its own, behind links of a fixed rate.

A star: every rank has a cable to one switch. Each end of each cable sends through a token bucket
(``tc qdisc ... tbf``), so a rank receives and sends at ``megabits`` a second each. Needs root on
Linux, for `ip` and `tc` of iproute2.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LINK, PORT = "lsl0", 29477
CLONE_NEWNET = 0x40000000
FIRST = 2
"""Steps that are not counted: connections open, DDP lays out its buckets."""
LIMIT_S = 400


@dataclass(frozen=True)
class Measured:
    """Of rank 0, after its first steps."""

    step_s: list[float]
    wire_bytes_per_step: float
    """Received and sent, with the headers of TCP, IP and Ethernet; half of it in each direction."""
    outcome: dict[str, Any]


def missing() -> str | None:
    """Why no links can be shaped here; None where they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "shaping links needs root on Linux"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "shaping links needs ip and tc: apt-get install iproute2"
    try:
        with links(2, 100):
            return None
    except subprocess.CalledProcessError as error:
        return f"links cannot be shaped here: {error.stderr.strip()}"


@contextmanager
def links(ranks: int, megabits: float) -> Iterator[list[str]]:
    """The names of ``ranks`` namespaces, rank r at 10.78.0.(r + 1)."""
    switch = f"lsl-{os.getpid()}-switch"
    names = [f"lsl-{os.getpid()}-{rank}" for rank in range(ranks)]
    try:
        for name in (switch, *names):
            call("ip", "netns", "add", name)
        call("ip", "-n", switch, "link", "add", "lslbr", "type", "bridge")
        call("ip", "-n", switch, "link", "set", "lslbr", "up")
        for rank, name in enumerate(names):
            peer = ("peer", "name", LINK, "netns", name)
            call("ip", "-n", switch, "link", "add", f"lsl{rank}p", "type", "veth", *peer)
            call("ip", "-n", switch, "link", "set", f"lsl{rank}p", "master", "lslbr", "up")
            call("ip", "-n", name, "addr", "add", f"10.78.0.{rank + 1}/24", "dev", LINK)
            for device in (LINK, "lo"):
                call("ip", "-n", name, "link", "set", device, "up")
            shape(name, LINK, megabits)
            shape(switch, f"lsl{rank}p", megabits)
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def shape(namespace: str, device: str, megabits: float) -> None:
    """An idle link saves up 10 ms of its rate, and sends no more than that at once."""
    burst = f"{max(4000, round(megabits * 1e6 / 8 * 0.010))}"
    bucket = ("tbf", "rate", f"{megabits}mbit", "burst", burst, "latency", "2s")
    call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)


def call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def measure(ranks: int, megabits: float, overrides: Sequence[str]) -> Measured:
    """One run of ``ranks`` processes of one thread, as under torchrun with one process a host.

    Raises `RuntimeError` when a rank fails or `LIMIT_S` have passed.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or it warns: addresses have no names
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["benchmarks.ours", "lockstep.exchange.chosen"])
    with (
        links(ranks, megabits) as names,
        tempfile.TemporaryDirectory(prefix="lockstep-") as scratch,
    ):
        receiving, workers = [], []
        for rank, name in enumerate(names):
            here, there = forks.Pipe(duplex=False)
            settings = (rank, ranks, name, list(overrides), Path(scratch), there)
            workers.append(forks.Process(target=run_rank, args=settings))
            workers[-1].start()
            there.close()
            receiving.append(here)
        try:
            return gathered(receiving)
        finally:
            for worker in workers:
                worker.join(10)
                if worker.is_alive():
                    worker.kill()


def gathered(receiving: list[Connection]) -> Measured:
    """Rank 0's result, when all ranks have sent theirs."""
    left, first, until = list(receiving), None, time.monotonic() + LIMIT_S
    while left:
        ready = wait(left, timeout=max(0.0, until - time.monotonic()))
        if not ready:
            raise RuntimeError(f"{len(left)} ranks were not done after {LIMIT_S} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                said = pipe.recv()
            except EOFError:
                raise RuntimeError("a rank died; its error is above") from None
            first = said if pipe is receiving[0] else first
            left.remove(pipe)
    assert isinstance(first, Measured)
    return first


def run_rank(
    rank: int, ranks: int, namespace: str, overrides: list[str], directory: Path, to: Connection
) -> None:
    """In a fresh process without threads: `setns` moves only the thread that calls it."""
    enter(namespace)
    os.environ |= {
        **{"RANK": str(rank), "WORLD_SIZE": str(ranks), "GROUP_RANK": str(rank)},
        **{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "links"},
        **{"MASTER_ADDR": "10.78.0.1", "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": LINK},
    }
    from benchmarks.ours import outcome_of

    watching = stamps()
    where = ["trainer.devices=1", f"trainer.num_nodes={ranks}", "trainer.accelerator=cpu"]
    outcome = outcome_of([*overrides, *where], directory, [watching], ["launch.threads=1"])
    to.send(Measured(watching.step_s(), watching.bytes_per_step(), outcome))
    to.close()


def enter(namespace: str) -> None:
    with (Path("/run/netns") / namespace).open() as file:
        libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns into {namespace}")


def on_the_wire() -> int:
    """Bytes received and sent by this rank's link so far."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.strip().partition(":")
        if name == LINK:
            columns = numbers.split()
            return int(columns[0]) + int(columns[8])
    raise RuntimeError(f"this rank has no {LINK}")


def stamps() -> Any:
    """A callback; made here, so that Lightning is imported by the ranks only."""
    from lightning.pytorch import Callback

    class Stamps(Callback):
        def __init__(self) -> None:
            self.ends, self.bytes = list[float](), list[int]()

        def on_train_batch_end(self, *_: Any) -> None:
            self.ends.append(time.perf_counter())
            self.bytes.append(on_the_wire())

        def step_s(self) -> list[float]:
            ends = self.ends[FIRST:]
            return [after - before for before, after in pairwise(ends)]

        def bytes_per_step(self) -> float:
            counted = self.bytes[FIRST:]
            return (counted[-1] - counted[0]) / (len(counted) - 1)

    return Stamps()
