"""A SLURM job that nears its time limit goes back into the queue, and its run goes on from there.

``#SBATCH --signal=SIGUSR1@90`` sends the notice to each task of ``srun``; the ranks save and leave
(`lockstep.callbacks.stop_together`), and rank zero requeues. SLURM's own requeueing,
by an operator or after a node has failed, sends SIGTERM or nothing, and needs no command from here.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from lockstep.record import Run
from lockstep.signals import stop

log = logging.getLogger(__name__)

ANSWER_S = 60.0
"""Seconds that SLURM's controller gets to answer."""
GOES_ON = f"{__package__.partition('.')[0]}_GOES_ON".upper()
"""Set for a job of a sweep whose directory an earlier job has begun."""


def was_requeued(directory: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """This job, or one that it goes on for, ran before and has begun the run in ``directory``."""
    before = int(environ.get("SLURM_RESTART_COUNT") or "0") > 0 or GOES_ON in environ
    begun = (directory / ".hydra" / "config.yaml").exists()
    return before and "SLURM_STEP_ID" in environ and begun


def requeue_if_told(run: Run, environ: Mapping[str, str] = os.environ) -> None:
    """Put this job back into the queue if SIGUSR1 has ended its run; once, from rank zero.

    SLURM then ends what is left of the job, so this comes after everything that has to be written.
    """
    if stop.asked != getattr(signal, "SIGUSR1", None) or "SLURM_STEP_ID" not in environ:
        return
    job = environ["SLURM_JOB_ID"]
    problem = _why_not(run) or _requeue(job)
    if problem is None:
        log.info("requeued job %s: the run goes on when it starts again", job)
    else:
        log.error("job %s is not requeued: %s. Go on with resume=%s", job, problem, run.directory)


def _why_not(run: Run) -> str | None:
    if "MULTIRUN" in str(run.hydra.get("mode")):
        return "its sweep would begin anew; sweep.resume goes on with it"
    return None


def _requeue(job: str) -> str | None:
    """What SLURM says against it; None when it has requeued the job."""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr or done.stdout).strip()
