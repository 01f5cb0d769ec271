"""Where the ranks of one machine meet: a store on a free port, and nobody else to wait for."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from typing_extensions import override

HOST = "127.0.0.1"
TIMEOUT_S = 60


def local_store() -> TCPStore:
    """A store on a free port of the loopback device: torch's own would listen on all devices."""
    listening = socket.create_server((HOST, 0), backlog=1024)
    return TCPStore(
        HOST,
        listening.getsockname()[1],
        None,
        True,
        timedelta(seconds=TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def meeting_at(store: TCPStore) -> dict[str, str]:
    """The environment in which torch's ``env://`` takes this store instead of making one."""
    return {
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
    }


def of_one_machine(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for ranks that need no other machine: gloo listens on the loopback device.

    By itself it takes the device of the host's name, which others may reach. NCCL chooses its own.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    chosen = {"GLOO_SOCKET_IFNAME": loopback} if loopback else {}
    return {**chosen, **environ}


class OneMachine(StaticTCPRendezvous):
    """torch's ``static`` on a port that is free.

    ``c10d`` lets agents of several machines find each other, which takes it 0.3 s of asking and
    pausing also for one; plain ``static`` wants a port that somebody may take before it is used.
    """

    name = "lockstep"

    def __init__(self, run_id: str) -> None:
        store = local_store()
        super().__init__(HOST, store.port, 0, 1, run_id, TIMEOUT_S)
        self._store = store  # one is made only where there is none

    @override
    def get_backend(self) -> str:
        return self.name


def register() -> str:
    """Make it known to torch's elastic agent; returns the name to ask for."""
    rendezvous_handler_registry.register(OneMachine.name, _make)
    return OneMachine.name


def _make(parameters: RendezvousParameters) -> OneMachine:
    return OneMachine(parameters.run_id)
