"""Before they train, all ranks of a torchrun know that they compute one run in one directory."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.hosts.loss import sign_in
from lockstep.hosts.meeting import (
    PATIENCE_S,
    REFUSED,
    Meeting,
    PeerRefusal,
    from_rank_zero,
    meeting,
    under_torchrun,
)
from lockstep.record import Run
from lockstep.results import code_version
from lockstep.resume import flat, newest_checkpoint
from lockstep.rundir import config_file

VISIBLE_S = 5.0
"""A network file system may show a new file this late."""
SHOWN = 3
"""Differences that a message lists."""


def restarted(directory: Path) -> bool:
    """torchrun has started this run before, and it has written its config: it goes on."""
    if not under_torchrun():
        return False

    def decide() -> str:
        met = meeting()
        first = met.first("directory", f"{met.token} {directory.resolve()}")
        token, _, before = first.partition(" ")
        began = config_file(directory).exists()
        return str(token != met.token and before == str(directory.resolve()) and began)

    return from_rank_zero("restarted", decide) == "True"


def agreed(run: Run) -> Run:
    """The run as rank 0 has it; raises `UsageError` on every rank where they do not fit together.

    The first message of a rank says what it was started with; rank 0 compares. Then each says
    whether it sees what rank 0 has written in the run's directory.
    """
    if not under_torchrun():
        return run
    met = meeting()
    sign_in(met)
    mark = run.directory / f".rank0-{met.token}"
    if met.rank == 0:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    try:
        met.put(f"here/{met.rank}", json.dumps(_described(run)))
        _settle(met, "started", lambda: first_difference(_collected(met, "here")))
        met.put(f"sees/{met.rank}", json.dumps(_sees(mark)))
        _settle(met, "sees all", lambda: _blind(_collected(met, "sees"), run.directory))
    finally:
        if met.rank == 0:
            mark.unlink(missing_ok=True)
    checkpoint = from_rank_zero(
        "checkpoint", lambda: str((newest_checkpoint(run.directory) if run.resumed else None) or "")
    )
    return replace(run, checkpoint=Path(checkpoint) if checkpoint else None)


def _settle(met: Meeting, key: str, problem_of: Any) -> None:
    """Rank 0 judges; the others wait for what it says."""
    if met.rank != 0:
        met.take(key, 2 * PATIENCE_S)
        return
    problem = problem_of()
    if problem:
        met.put(REFUSED, problem)
        raise PeerRefusal(problem)
    met.put(key, "well")


def _described(run: Run) -> dict[str, Any]:
    from importlib.metadata import version

    values = {key: repr(value) for key, value in flat(asdict(run.config))}
    started = {"code": code_version() or "", "torch": version("torch")}
    return {"host": socket.gethostname(), "config": values, **started}


def _collected(met: Meeting, key: str) -> list[dict[str, Any]]:
    """What each rank has put there, in rank order."""
    deadline, found = time.monotonic() + PATIENCE_S, []
    for rank in range(met.world_size):
        try:
            text = met.take(f"{key}/{rank}", max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise UsageError(
                f"All {met.world_size} ranks must start within {PATIENCE_S:.0f} s of each other; "
                f"rank {rank} has not come. Look at the output of its host, and start all hosts "
                "with the same command."
            ) from None
        found.append(json.loads(text))
    return found


def first_difference(ranks: list[dict[str, Any]]) -> str | None:
    """The rule, the values and the repair, for the first rank that is not as rank 0 is."""
    for rank, there in enumerate(ranks):
        differences = list(_differences(ranks[0], there))
        if differences:
            more = f", and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
            return (
                "All ranks must be started with one command and one version of the code; rank 0 "
                f"({ranks[0]['host']}) and rank {rank} ({there['host']}) differ in "
                f"{', '.join(differences[:SHOWN])}{more}. Start every host with the same "
                "overrides, files and packages."
            )
    return None


def _differences(one: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    for name in ("code", "torch"):
        if one[name] != other[name]:
            yield f"{name} ({one[name]} and {other[name]})"
    mine, yours = one["config"], other["config"]
    for key in sorted(mine.keys() | yours.keys()):
        if mine.get(key) != yours.get(key):
            yield f"{key} ({mine.get(key)} and {yours.get(key)})"


def _sees(mark: Path) -> dict[str, Any]:
    deadline = time.monotonic() + VISIBLE_S
    while True:
        # Listing asks a network file system anew, where looking up one name may be cached.
        seen = mark.parent.is_dir() and mark.name in os.listdir(mark.parent)  # noqa: PTH208
        if seen or time.monotonic() > deadline:
            return {"seen": seen, "host": socket.gethostname(), "path": str(mark.parent.resolve())}
        time.sleep(0.1)


def _blind(ranks: list[dict[str, Any]], directory: Path) -> str | None:
    blind = [rank for rank, there in enumerate(ranks) if not there["seen"]]
    if not blind:
        return None
    names = ", ".join(sorted({ranks[rank]["host"] for rank in blind}))
    return (
        "Every host must see the run directory of rank 0, for checkpoints to be found again; "
        f"{directory.resolve()} on {ranks[0]['host']} is not what {ranks[blind[0]]['path']} is on "
        f"{names} (ranks {', '.join(map(str, blind))}). Use a file system that all hosts mount: "
        "hydra.run.dir=<a directory on it>, or start in one."
    )
