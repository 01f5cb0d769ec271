"""Where the ranks that torchrun started meet: a store that belongs to this attempt alone.

torchrun's own store lives through its restarts, and so do the addresses that dead ranks left in it:
torch 2.14 then connects to those ("Gloo connectFullMesh failed"). ``TORCHELASTIC_RESTART_COUNT``
cannot tell the attempts apart, for it differs between hosts: a host whose peer failed restarts
without counting. So rank 0 opens a store on a free port for each attempt, the others find it
through torchrun's, and the process group meets there too. torch is imported when it is needed.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from lockstep.errors import UsageError

PATIENCE_S = 60.0
"""Hosts import torch at their own pace; one that comes later than this is not coming."""
TELL_S = 3.0
"""For a last word: where rank 0 is gone, it has told or will be missed."""
POLL_S = 0.02
REFUSED = "refused"
Answer = TypeVar("Answer")


class PeerRefusal(UsageError):
    """What another rank refuses; each host's first rank prints it."""


@dataclass(frozen=True)
class Meeting:
    rank: int
    world_size: int
    store: Any
    """A `torch.distributed.TCPStore` which rank 0's process serves."""
    lasting: Any | None
    """torchrun's store, which outlives an attempt; None where it has none to share."""
    token: str
    """Names this attempt."""

    def put(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def take(self, key: str, patience_s: float = PATIENCE_S) -> str:
        """Wait for ``key``; raises `PeerRefusal` when a rank refuses, TimeoutError when late."""
        deadline = time.monotonic() + patience_s
        while not self.store.check([key]):
            if self.store.check([REFUSED]):
                raise PeerRefusal(self.store.get(REFUSED).decode())
            if time.monotonic() > deadline:
                raise TimeoutError(key)
            time.sleep(POLL_S)
        return str(self.store.get(key).decode())

    def first(self, key: str, value: str) -> str:
        """``value``, or what an earlier attempt of this torchrun has put there."""
        if self.lasting is None:
            return value
        return str(self.lasting.compare_set(f"lockstep/{key}", "", value).decode())


_held: list[Meeting] = []


def under_torchrun() -> bool:
    """This process is one rank of several that torchrun started."""
    known = {"TORCHELASTIC_RUN_ID", "RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    return known and int(os.environ.get("WORLD_SIZE", "1")) > 1


def meeting(patience_s: float = PATIENCE_S) -> Meeting:
    """This attempt's meeting; the first call waits until rank 0 is there."""
    if not _held:
        _held.append(_meet(patience_s))
    return _held[0]


def from_rank_zero(key: str, make: Callable[[], str]) -> str:
    """What rank 0 made, on every rank; made here where this process is on its own."""
    if not under_torchrun():
        return make()
    met = meeting()
    if met.rank == 0:
        met.put(key, make())
    return met.take(key)


def tell_peers(message: str) -> None:
    """Before this rank leaves with an error: nobody shall wait for it."""
    if under_torchrun():
        within(TELL_S, lambda: meeting(TELL_S).put(REFUSED, message))


def within(seconds: float, ask: Callable[[], Answer]) -> Answer | None:
    """``ask()``, or None when the store does not answer: over a cut link it never does."""
    answers: list[Answer] = []

    def run() -> None:
        try:
            answers.append(ask())
        except (RuntimeError, OSError):
            return  # rank 0's store is gone: that is the answer

    asking = threading.Thread(target=run, name="lockstep.hosts", daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else None


def _meet(patience_s: float) -> Meeting:
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    wait = timedelta(seconds=patience_s)
    lasting = _client(address, port, wait) if shared else None
    if rank == 0:
        token = secrets.token_hex(8)
        # Shared by whatever in this process asks for a store on its port: the process group does.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            0 if shared else port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(seconds=PATIENCE_S),
        )
        store.set("token", token)
        if lasting is not None:
            lasting.set("lockstep/attempt", f"{store.port} {token}")
    elif lasting is None:
        store = _client(address, port, wait)
        token = store.get("token").decode()
    else:
        store, token = _find(lasting, address, time.monotonic() + patience_s)
    os.environ["MASTER_PORT"] = str(store.port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    return Meeting(rank, world_size, store, lasting, token)


def _find(lasting: Any, address: str, deadline: float) -> tuple[Any, str]:
    """Rank 0's store. A dead rank 0's port is closed, or somebody else's: its token tells."""
    while time.monotonic() < deadline:
        if lasting.check(["lockstep/attempt"]):
            port, token = lasting.get("lockstep/attempt").decode().split()
            if _is_open(address, int(port)):
                store = _client(address, int(port), timedelta(seconds=PATIENCE_S))
                if store.get("token").decode() == token:
                    return store, token
        time.sleep(POLL_S)
    raise TimeoutError("rank 0 did not come to the meeting")


def _is_open(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def _client(address: str, port: int, wait: timedelta) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(address, port, is_master=False, timeout=wait)
