"""What each task of a SLURM job does for a sweep: one rank of one run."""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from lockstep.cli import readable_errors
from lockstep.errors import one_line
from lockstep.record import record_refusal
from lockstep.slurm.requeue import GOES_ON


@dataclass
class SweptRun:
    """Travels by submitit's pickle: what was composed when it was submitted is what will run, even
    if ``conf/`` has changed while it was in the queue."""

    hydra_context: HydraContext
    task: TaskFunction
    overrides: list[str]
    config: DictConfig
    """Of a single run, not of a sweep: it may be requeued, and srun's tasks are its ranks."""
    goes_on: bool
    """Its directory holds the beginning of this run."""
    state: Any = field(default_factory=Singleton.get_state)
    path: list[str] = field(default_factory=lambda: list(sys.path))
    script: str = field(default_factory=lambda: sys.argv[0])

    def __call__(self) -> None:
        """Leaves with the exit status of a run that was started by hand."""
        for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)  # submitit's handlers ignore the first two
        logging.getLogger("submitit").propagate = False  # its lines are no part of train.log
        sys.path[:], sys.argv[:] = self.path, [self.script]
        Singleton.set_state(self.state)
        setup_globals()
        if self.goes_on:
            os.environ[GOES_ON] = "1"
        with readable_errors():
            self._run()

    def _run(self) -> None:
        job = run_job(
            hydra_context=self.hydra_context,
            task_function=self.task,
            config=self.config,
            job_dir_key="hydra.run.dir",
            job_subdir_key=None,
        )
        error = job._return_value  # the property raises, and prints
        if isinstance(error, Exception):
            directory = Path(self.config.hydra.run.dir)
            record_refusal(directory, self.overrides, one_line(error))
            raise error
