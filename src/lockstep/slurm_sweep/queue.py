"""What SLURM's controller says of jobs: ``squeue`` and ``scancel``.

submitit asks ``sacct``, which needs an accounting database that small clusters do not have; without
it, a job that was cancelled would be waited for without end.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterable

from lockstep.errors import one_line

log = logging.getLogger(__name__)

ANSWER_S = 60.0
"""Seconds that SLURM's controller gets to answer."""
ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}
"""States that a job does not leave by itself; one that was requeued is PENDING."""


def states() -> dict[str, str] | None:
    """State of each job of this user, tasks of arrays by ``<job>_<task>``; None: no answer now.

    SLURM forgets a job some minutes after its end (MinJobAge).
    """
    command = ["squeue", "--me", "--array", "--noheader", "--states=all", "--format=%i %T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or one_line(error)
        log.warning("squeue does not answer, it will be asked again: %s", str(said).strip())
        return None
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.strip())


def cancel(jobs: Iterable[str]) -> None:
    """End jobs; those that are over already do not matter."""
    known = list(jobs)
    if not known:
        return
    try:
        done = subprocess.run(["scancel", *known], capture_output=True, text=True, timeout=ANSWER_S)
        problem = done.stderr.strip()
    except (OSError, subprocess.SubprocessError) as error:
        problem = one_line(error)
    if problem:
        log.error("scancel %s: %s", " ".join(known), problem)
