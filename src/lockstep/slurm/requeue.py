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
from pathlib import Path

from hydra.types import RunMode

from lockstep.record import Run
from lockstep.rundir import config_file
from lockstep.signals import stop

log = logging.getLogger(__name__)

ANSWER_S = 60.0
"""Seconds that SLURM's controller gets to answer."""
ITS_SWEEP = "its sweep would begin anew; sweep.resume goes on with it"
GOES_ON = f"{__package__.partition('.')[0]}_GOES_ON".upper()
"""Set for a job of a sweep whose directory an earlier job has begun."""


def was_requeued(directory: Path) -> bool:
    """This job, or one that it goes on for, ran before and has begun the run in ``directory``."""
    before = int(os.environ.get("SLURM_RESTART_COUNT") or "0") > 0 or GOES_ON in os.environ
    return before and "SLURM_STEP_ID" in os.environ and config_file(directory).exists()


def requeue_if_told(run: Run) -> None:
    """Put this job back into the queue if SIGUSR1 has ended its run; once, from rank zero.

    SLURM then ends what is left of the job, so this comes after everything that has to be written.
    """
    if stop.asked != getattr(signal, "SIGUSR1", None) or "SLURM_STEP_ID" not in os.environ:
        return
    job = os.environ["SLURM_JOB_ID"]
    swept = run.hydra.get("mode") == RunMode.MULTIRUN
    problem = ITS_SWEEP if swept else _requeue(job)
    if problem is None:
        log.info("requeued job %s: the run goes on when it starts again", job)
    else:
        log.error("job %s is not requeued: %s. Go on with resume=%s", job, problem, run.directory)


def _requeue(job: str) -> str | None:
    """What SLURM says against it; None when it has requeued the job."""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr or done.stdout).strip()
