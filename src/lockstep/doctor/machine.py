"""What one machine has: packages, devices, backends, shared memory, ports, names."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from lockstep.devices import available, driver_gpus, resolve_accelerator
from lockstep.doctor.finding import Finding
from lockstep.errors import UsageError

SHM = Path("/dev/shm")
LEAST_SHM_BYTES = 256 * 2**20
REACH_S = 3.0
"""Docker gives 64 MiB, which loader processes and NCCL's ranks of one machine soon fill."""
TORCHRUN_PORTS = {29400: "torchrun --rdzv-backend=c10d", 29500: "torchrun --master-port"}
"""Where they meet unless told otherwise."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def findings(accelerator: str, several_hosts: bool, meets: bool) -> Iterator[Finding]:
    """Everything that can be seen without another process. ``meets``: torchrun holds its port."""
    yield from versions()
    yield devices(accelerator)
    yield from backends(accelerator)
    yield shared_memory()
    if not meets:
        yield from ports(TORCHRUN_PORTS)
    yield name_of_host(several_hosts)
    yield from interfaces(os.environ, [name for _, name in socket.if_nameindex()])


def versions() -> Iterator[Finding]:
    """Each package that the project needs, against the bounds it was written for."""
    from packaging.requirements import Requirement

    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    try:
        needed = [Requirement(text) for text in requires("lockstep") or []]
    except PackageNotFoundError:
        yield Finding("lockstep", "is not installed here", "Say: make setup")
        return
    for requirement in needed:
        if requirement.marker is None:  # the others are of an extra
            yield _package(requirement.name, str(requirement.specifier))


def _package(name: str, bounds: str) -> Finding:
    from packaging.specifiers import SpecifierSet

    repair = f"Say: pip install '{name}{bounds}' -c constraints.txt"
    try:
        there = version(name)
    except PackageNotFoundError:
        return Finding(name, "is not installed", repair)
    if SpecifierSet(bounds).contains(there, prereleases=True):
        return Finding(name, there)
    return Finding(name, f"{there} is outside {bounds}", repair)


def devices(accelerator: str) -> Finding:
    import torch

    driver = driver_gpus()
    if driver and not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"CUDA_VISIBLE_DEVICES={hidden!r}" if hidden is not None else torch.__version__
        return Finding(
            "devices",
            f"the driver knows {driver} GPUs, torch can use none ({why})",
            "Unset that variable, or install the torch that pytorch.org names for this driver.",
        )
    kind = resolve_accelerator(accelerator)
    count = available(kind)
    if not count:
        return Finding("devices", f"0 of {kind}", "Use trainer.accelerator=cpu.")
    return Finding("devices", f"{count} {'cpu cores' if kind == 'cpu' else kind}")


def backend_of(accelerator: str) -> str:
    return "nccl" if resolve_accelerator(accelerator) == "gpu" else "gloo"


def backends(accelerator: str) -> Iterator[Finding]:
    import torch.distributed as dist

    there = [name for name in ("gloo", "nccl", "mpi") if dist.is_backend_available(name)]
    needed = backend_of(accelerator)
    repair = None
    if needed not in there:
        repair = f"{accelerator} needs {needed}: install a torch that was built with it."
    yield Finding("backends", ", ".join(there) or "none", repair)


def shared_memory() -> Finding:
    if not SHM.is_dir():
        return Finding("memory", f"no {SHM} on this system: torch shares memory by files")
    free = shutil.disk_usage(SHM).free
    text = f"{free / 2**20:.0f} MiB free in {SHM}"
    if free >= LEAST_SHM_BYTES:
        return Finding("memory", text)
    return Finding(
        "memory",
        f"{text}, less than {LEAST_SHM_BYTES / 2**20:.0f}",
        "In a container: docker run --shm-size=1g, or --ipc=host; else delete what fills it.",
    )


def ports(wanted: Mapping[int, str]) -> Iterator[Finding]:
    """The ports where launchers meet by default; a second job on one of them waits for ever."""
    for port, user in wanted.items():
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", port))
        except OSError as error:
            yield Finding(
                "ports",
                f"{port} ({user}) cannot be had: {error.strerror}",
                "Name another: --rdzv-endpoint=HOST:PORT or --master-port=PORT, on every host.",
            )
        else:
            yield Finding("ports", f"{port} ({user}) is free")


def reach(endpoint: str) -> Finding:
    """Does somebody listen at ``HOST:PORT``? torchrun itself asks for minutes before it says no."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise UsageError(f"--reach must be HOST:PORT, as of --rdzv-endpoint; got {endpoint!r}.")
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except OSError as error:
        return Finding(
            "reach",
            f"nobody answers at {endpoint}: {error}",
            "Start torchrun on that host first, and look at its name, port and firewall.",
        )
    return Finding("reach", f"{endpoint} answers")


def name_of_host(several_hosts: bool) -> Finding:
    """Other hosts are told this host's name, or the address that it resolves to here."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Finding(
            "name", f"{name} does not resolve: {error}", f"Add '<address> {name}' to /etc/hosts."
        )
    named = any(os.environ.get(variable) for variable in INTERFACES)
    if several_hosts and address.startswith("127.") and not named:
        return Finding(
            "name",
            f"{name} resolves to {address}, which other hosts cannot reach",
            f"Set {INTERFACES[0]} (NCCL: {INTERFACES[1]}) to the interface, or mend /etc/hosts.",
        )
    return Finding("name", f"{name} resolves to {address}")


def interfaces(environ: Mapping[str, str], there: list[str]) -> Iterator[Finding]:
    for variable in INTERFACES:
        asked = environ.get(variable)
        if not asked or asked[0] in "^=":  # NCCL's own patterns
            continue
        for name in asked.split(","):
            prefix = variable.startswith("NCCL")  # there, eth is eth0 and eth1
            known = any(one.startswith(name) if prefix else one == name for one in there)
            repair = None if known else f"There are: {', '.join(there)}."
            text = f"{variable}={name}" + ("" if known else " is no interface of this host")
            yield Finding("interface", text, repair)
