"""``python -m lockstep.doctor``: a good machine is good, a fault comes with its repair."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import environment
from hosts import INTERFACE, PORT, finish, hosts, missing, output

from lockstep.doctor import exchange, machine
from lockstep.doctor.finding import Finding
from lockstep.errors import UsageError

RATE = re.compile(r"16 MiB over (\d+) ranks \(gloo, cpu\) in ([\d.]+) ms, ([\d.]+) GB/s a rank")


def bad(found: list[Finding]) -> list[str]:
    return [one.line() for one in found if one.repair]


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lockstep.doctor", "--accelerator=cpu", *arguments]
    return subprocess.run(command, env=environment({}), capture_output=True, text=True, timeout=100)


@pytest.mark.processes
def test_an_all_reduce_over_three_processes_has_the_rate_of_its_time() -> None:
    done = doctor("--devices=3")
    lines = done.stdout.splitlines()
    found = RATE.search(done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert int(found[1]) == 3
    expected = 2 * 2 / 3 * 16 * 2**20 / (float(found[2]) / 1e3) / 1e9
    assert float(found[3]) == pytest.approx(expected, abs=0.006, rel=0.01)
    faults = [line for line in lines if line.startswith("bad")]
    assert done.returncode == (1 if faults else 0)
    assert lines[-1] == (f"{len(faults)} bad: see the repairs" if faults else "all is good")


@pytest.mark.processes
def test_a_rank_that_dies_is_a_bad_line_and_no_traceback() -> None:
    found = exchange.on_this_machine("cpu", 2, timeout_s=1e-3)
    assert bad([found]), "nobody can meet within a millisecond"
    assert found.text.startswith("of 2 ranks failed on ")
    assert "\n" not in found.line()


def test_a_sum_that_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that does not add: each rank keeps its own."""
    for name in ("barrier", "all_reduce"):
        monkeypatch.setattr(exchange.dist, name, lambda *_: None)
    with pytest.raises(ValueError, match=r"over 2 ranks must be 3\.0; got 1\.0"):
        exchange.measured(0, 2, exchange._device("gloo", 0))


def test_a_port_that_is_taken_is_bad_and_a_free_one_good() -> None:
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("", 0))
        taken.listen()
        free.bind(("", 0))
        used, unused = taken.getsockname()[1], free.getsockname()[1]
        free.close()
        found = list(machine.ports({used: "one", unused: "other"}))
    assert bad(found) == [found[0].line()]
    assert f"{used} (one) cannot be had: Address already in use" in found[0].line()
    assert "--rdzv-endpoint=HOST:PORT" in found[0].line()


@pytest.mark.parametrize(
    ("address", "several", "interface", "is_bad"),
    [
        pytest.param("127.0.1.1", True, "", True, id="loopback-between-hosts"),
        pytest.param("127.0.1.1", False, "", False, id="loopback-on-one-host"),
        pytest.param("127.0.1.1", True, "eth0", False, id="loopback-but-an-interface-is-named"),
        pytest.param("10.0.0.1", True, "", False, id="an-address"),
        pytest.param(None, False, "", True, id="does-not-resolve"),
    ],
)
def test_a_name_that_other_hosts_cannot_reach_is_bad(
    monkeypatch: pytest.MonkeyPatch,
    address: str | None,
    several: bool,
    interface: str,
    is_bad: bool,
) -> None:
    def resolve(name: str) -> str:
        if address is None:
            raise socket.gaierror(-2, "Name or service not known")
        return address

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    found = machine.name_of_host(several)
    assert bool(found.repair) == is_bad
    assert socket.gethostname() in found.line()


@pytest.mark.parametrize(
    ("variable", "value", "faults"),
    [
        pytest.param("GLOO_SOCKET_IFNAME", "eth0", 0, id="one-that-is-there"),
        pytest.param("GLOO_SOCKET_IFNAME", "eth0,ens5", 1, id="the-second-is-not"),
        pytest.param("GLOO_SOCKET_IFNAME", "eth", 1, id="gloo-takes-whole-names"),
        pytest.param("NCCL_SOCKET_IFNAME", "eth", 0, id="nccl-takes-prefixes"),
        pytest.param("NCCL_SOCKET_IFNAME", "^docker", 0, id="nccl-takes-patterns"),
    ],
)
def test_an_interface_that_is_not_there_is_bad(variable: str, value: str, faults: int) -> None:
    found = bad(list(machine.interfaces({variable: value}, ["lo", "eth0"])))
    assert len(found) == faults
    assert all("There are: lo, eth0." in line for line in found)


def test_shared_memory_as_docker_gives_it_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("usage", (), {"free": 64 * 2**20})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    if not machine.SHM.is_dir():
        pytest.skip("needs /dev/shm")
    (line,) = bad([machine.shared_memory()])
    assert "64 MiB free" in line
    assert "--shm-size=1g" in line


@pytest.mark.parametrize(
    ("there", "words"),
    [
        pytest.param("2.6.3", "2.6.3 is outside", id="too-old"),
        pytest.param("2.7.1", "2.7.1 is outside", id="too-new"),
        pytest.param("2.6.4", None, id="the-first-that-is-good"),
    ],
)
def test_a_package_outside_its_bounds_is_bad(
    monkeypatch: pytest.MonkeyPatch, there: str, words: str | None
) -> None:
    monkeypatch.setattr(machine, "version", lambda _: there)
    found = machine._package("lightning", ">=2.6.4,<2.7")
    assert (words or there) in found.line()
    assert bool(found.repair) == (words is not None)
    assert words is None or "pip install 'lightning>=2.6.4,<2.7'" in found.line()


def test_a_rendezvous_answers_where_somebody_listens_and_only_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from lockstep.doctor.__main__ import main

    with socket.socket() as listens:
        listens.bind(("127.0.0.1", 0))
        listens.listen()
        endpoint = f"127.0.0.1:{listens.getsockname()[1]}"
        assert main([f"--reach={endpoint}"]) == 0
        assert f"{endpoint} answers" in capsys.readouterr().out
    assert main([f"--reach={endpoint}"]) == 1
    assert f"nobody answers at {endpoint}: " in capsys.readouterr().out
    for wrong in ("localhost", "localhost:", "localhost:0", "localhost:70000"):
        with pytest.raises(UsageError, match=f"must be HOST:PORT.*got '{wrong}'"):
            main([f"--reach={wrong}"])


def test_a_time_that_is_none_is_refused() -> None:
    from lockstep.doctor.__main__ import main

    with pytest.raises(UsageError, match="--timeout must be greater than 0; got -1"):
        main(["--timeout=-1"])


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("interface", "judge"),
    [
        pytest.param(INTERFACE, lambda code: code == 0, id="good"),
        pytest.param("lo", lambda code: code != 0, id="both-listen-on-loopback"),
    ],
)
def test_two_hosts_add_or_end_and_say_that_they_could_not(
    tmp_path: Path, interface: str, judge: Callable[[int], bool]
) -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with hosts(2) as made:
        started = [
            host.start(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2"),
                    *("--nproc-per-node=1", "--rdzv-backend=c10d"),
                    f"--rdzv-endpoint=10.77.0.1:{PORT}",
                    f"--rdzv-conf=is_host={int(host.number == 0)},read_timeout=5",
                    f"--local-addr={host.address}",
                    *("-m", "lockstep.doctor", "--timeout=5", "--accelerator=cpu"),
                ],
                tmp_path,
                {"GLOO_SOCKET_IFNAME": interface},
            )
            for host in made
        ]
        codes = finish(started, within_s=60)
        assert [host.pids() for host in made] == [[], []], "no orphans"
    assert all(map(judge, codes)), output(tmp_path, 0)
    printed = [output(tmp_path, number) for number in (0, 1)]
    if interface == INTERFACE:
        for number, text in enumerate(printed):
            assert RATE.search(text), text
            assert f"host{number}: good  name         host{number} resolves to" in text
    else:
        # The first that gives up takes the rendezvous along, and torchrun ends the other's rank.
        assert "bad   all-reduce   of 2 ranks failed on host" in "".join(printed), printed
        assert "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME" in "".join(printed)
