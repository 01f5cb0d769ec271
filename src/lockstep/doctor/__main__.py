"""``python -m lockstep.doctor``: what is good and bad here, before a run finds out."""

from __future__ import annotations

import argparse
import os
import socket
import sys

from lockstep.cli import readable_errors
from lockstep.devices import ACCELERATORS, resolve_accelerator, resolve_devices
from lockstep.doctor.finding import Finding
from lockstep.doctor.machine import findings, reach
from lockstep.errors import UsageError
from lockstep.hosts.meeting import under_torchrun

ABOUT = """Does this machine have what a run needs? Versions, devices, backends, shared memory,
ports, host name, and an all-reduce with its bandwidth. Over several hosts, start it on each as the
run would be: torchrun --nnodes=2 --nproc-per-node=2 ... -m lockstep.doctor"""
MORE = "Exit status: 0 all is good, 1 something is bad, 2 wrong command line."


def main(arguments: list[str] | None = None) -> int:
    """Print one line a finding; returns the exit status."""
    parser = argparse.ArgumentParser("python -m lockstep.doctor", None, ABOUT, MORE)
    add = parser.add_argument
    add("--accelerator", choices=ACCELERATORS, default="auto", help="%(default)s")
    add("--devices", default="auto", help="processes of the all-reduce: auto is all GPUs, or 2")
    add("--timeout", type=float, default=20, metavar="SECONDS", help="of it: %(default)s")
    add("--reach", metavar="HOST:PORT", help="does this rendezvous answer? and nothing else")
    asked = parser.parse_args(arguments)
    if asked.reach is not None:
        return _verdict(_print([reach(asked.reach)]))
    if asked.timeout <= 0:
        raise UsageError(f"--timeout must be greater than 0; got {asked.timeout:g}.")
    here = _among_ranks if under_torchrun() else _alone
    return here(asked)


def _alone(asked: argparse.Namespace) -> int:
    accelerator = resolve_accelerator(asked.accelerator)
    count = resolve_devices(asked.devices, accelerator)
    if asked.devices == "auto" and accelerator == "cpu":
        count = 2
    if isinstance(count, list):
        raise UsageError(f"--devices must be a number; got {asked.devices!r}.")
    bad = _print(list(findings(accelerator, several_hosts=False, meets=False)))
    from lockstep.doctor.exchange import on_this_machine

    bad += _print([on_this_machine(accelerator, count, asked.timeout)])
    return _verdict(bad)


def _among_ranks(asked: argparse.Namespace) -> int:
    """The first rank of each host speaks for it, all of them add."""
    from lockstep.doctor.exchange import failed, join

    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    speaks, bad = os.environ["LOCAL_RANK"] == "0", 0
    if speaks:
        bad = _print(list(findings(asked.accelerator, world > local, meets=True)))
    try:
        text = join(asked.accelerator, asked.timeout)
    except (RuntimeError, ValueError, OSError) as error:  # torch's are RuntimeErrors
        found = failed(world, error)
    else:
        found = Finding("all-reduce", text)
    if speaks:
        return _verdict(bad + _print([found]))
    return 1 if found.repair else 0


def _print(found: list[Finding]) -> int:
    """How many are bad. In one write, so that hosts do not mix within a line."""
    host = f"{socket.gethostname()}: " if under_torchrun() else ""
    print("".join(f"{host}{one.line()}\n" for one in found), end="", flush=True)
    return sum(one.repair is not None for one in found)


def _verdict(bad: int) -> int:
    print("all is good" if bad == 0 else f"{bad} bad: see the repairs", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    with readable_errors(settings=False):
        sys.exit(main())
