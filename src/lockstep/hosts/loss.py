"""Who was lost: ranks of a torchrun that break say so, and those that cannot are named."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from typing import Any

from lockstep.errors import RunFailed, UsageError, one_line
from lockstep.hosts.meeting import POLL_S, Meeting, meeting, under_torchrun, within
from lockstep.record import Run, record_death

ANSWER_S = 3.0
"""What the ranks that are left get to say that they broke, too."""
BEAT_S = 0.5
"""Between two signs of life, of which several fit into `ANSWER_S`."""
OF_A_PEER = re.compile(r"gloo|nccl|connection|socket|timed out|broken pipe|store", re.IGNORECASE)
"""In what torch raises where a peer does not answer; each backend has its own words."""


def explained(run: Run, error: BaseException, seen: BaseException) -> BaseException:
    """What a person shall read: the rank that broke first or is gone, where that is not this one.

    A rank that was killed, or whose network is cut, says nothing; the others read of a lost
    connection, with an address at best.
    """
    if run.placement.kind != "launched" or not under_torchrun():
        return seen
    told = within(2 * ANSWER_S, lambda: _tell_and_hear(meeting(), error, seen))
    if told is None:
        lost = RunFailed(f"rank 0 was lost (killed, or its network is cut): {one_line(error)}")
        if run.placement.rank != 0 and run.directory.is_dir():
            record_death(run.directory, run.overrides, str(lost))
        return lost if isinstance(seen, RunFailed | SystemExit) else seen
    return RunFailed(told) if told else seen


def sign_in(met: Meeting) -> None:
    """Leave this host's name, for the day on which it does not answer, and signs of life.

    A rank that waits for one that is well is told nothing by gloo until ``strategy.timeout_s``.
    """
    met.put(f"host/{met.rank}", socket.gethostname())
    threading.Thread(target=_beat, args=(met,), name="lockstep.alive", daemon=True).start()


def _beat(met: Meeting) -> None:
    while True:
        try:
            met.store.add(f"alive/{met.rank}", 1)
        except (RuntimeError, OSError):
            return  # rank 0's store is gone, and with it whoever counts
        time.sleep(BEAT_S)


def _tell_and_hear(met: Meeting, error: BaseException, seen: BaseException) -> str:
    """The cause, when it is another rank's; empty when it is this one's own."""
    order = met.store.add("failures", 1)
    note = {"order": order, "error": one_line(error), "peer": _is_of_a_peer(seen)}
    if isinstance(seen, SystemExit | KeyboardInterrupt):
        note["stopped"] = True
    met.put(f"failed/{met.rank}", json.dumps(note))
    if isinstance(seen, UsageError | KeyboardInterrupt):
        return ""
    if not note["peer"] and not isinstance(seen, SystemExit):
        return ""
    before = _beats(met)
    notes = _notes(met, wait=bool(note["peer"]))
    causes = [(item["order"], rank) for rank, item in notes.items() if _is_cause(item)]
    if causes:
        rank = min(causes)[1]
        return f"rank {rank} ({_host(met, rank)}): {notes[rank]['error']}"
    silent = [rank for rank in range(met.world_size) if rank not in notes]
    after = _beats(met)
    gone = [rank for rank in silent if after[rank] == before[rank]] or silent
    if note["peer"] and gone:
        names = ", ".join(f"{rank} ({_host(met, rank)})" for rank in gone)
        many = "s" if len(gone) > 1 else ""
        return f"rank{many} {names} lost (killed, or the network is cut): {note['error']}"
    return ""


def _notes(met: Meeting, wait: bool) -> dict[int, dict[str, Any]]:
    """What the ranks say that have broken, after a while in which they may notice."""
    deadline = time.monotonic() + (ANSWER_S if wait else 0)
    while True:
        there = [rank for rank in range(met.world_size) if met.store.check([f"failed/{rank}"])]
        if len(there) == met.world_size or time.monotonic() > deadline:
            return {rank: json.loads(met.store.get(f"failed/{rank}").decode()) for rank in there}
        time.sleep(POLL_S)


def _beats(met: Meeting) -> list[int]:
    return [met.store.add(f"alive/{rank}", 0) for rank in range(met.world_size)]


def _is_cause(note: dict[str, Any]) -> bool:
    return not note["peer"] and not note.get("stopped")


def _is_of_a_peer(seen: BaseException) -> bool:
    return isinstance(seen, RunFailed) and OF_A_PEER.search(str(seen)) is not None


def _host(met: Meeting, rank: int) -> str:
    return str(met.store.get(f"host/{rank}").decode())
