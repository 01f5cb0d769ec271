"""The name of a run's directory: the same on every rank, whatever started it."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path

from lockstep.errors import UsageError


def run_directory(root: str, resume: str | None) -> str:
    """A new directory below ``root``; that of the run to go on with; or, for ``latest``, that of
    the run below ``root`` which was written to last."""
    if resume is None:
        return f"{root}/{run_name()}"
    if resume != "latest":
        return resume
    runs = sorted(Path(root).glob("*/*/result.json"), key=lambda path: path.stat().st_mtime_ns)
    if not runs:
        raise UsageError(
            f"resume=latest needs a run in {root}/, and there is none. Use resume=<its directory>."
        )
    return str(runs[-1].parent)


def run_name(environ: Mapping[str, str] = os.environ) -> str:
    """``<date>/<time>-<id>``, drawn once by rank 0; under SLURM ``slurm/<job>``, so that a requeued
    job finds its directory again."""
    if {"TORCHELASTIC_RUN_ID", "RANK", "MASTER_PORT"} <= environ.keys() and (
        int(environ.get("WORLD_SIZE", "1")) > 1
    ):
        return _agreed_under_torchrun(environ)
    if "SLURM_STEP_ID" in environ and int(environ.get("SLURM_NTASKS", "1")) > 1:
        return f"slurm/{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    return _drawn()


@functools.cache
def _drawn() -> str:
    """One name per command, however often a config is resolved."""
    return f"{datetime.now():%Y-%m-%d/%H-%M-%S}-{secrets.token_hex(2)}"


def _agreed_under_torchrun(environ: Mapping[str, str]) -> str:
    """Ranks start in different seconds, on machines with different clocks: rank 0's name is passed
    to the others through the launcher's own store."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return f"torchrun/{environ['TORCHELASTIC_RUN_ID']}-{environ['MASTER_PORT']}"
    import torch.distributed as dist

    store = dist.TCPStore(  # type: ignore[attr-defined]
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=60),
    )
    mine = dist.PrefixStore(  # type: ignore[attr-defined]
        f"lockstep/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store
    )
    if int(environ["RANK"]) == 0:
        mine.set("run_name", _drawn())
    return str(mine.get("run_name").decode())
