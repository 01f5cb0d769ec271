"""The jobs of a sweep over SLURM: handed over, waited for, and read from their ``result.json``."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, read_write
from omegaconf.errors import OmegaConfBaseException

from lockstep.errors import RunFailed, UsageError
from lockstep.processes import unchanged_process
from lockstep.record import record_death, record_refusal
from lockstep.results import DONE, Result, objective_value, read_result
from lockstep.rundir import config_file, next_number
from lockstep.signals import leave_on_signals
from lockstep.slurm_sweep.queue import ENDED, cancel, states
from lockstep.slurm_sweep.shape import Shape, check_options, shape_of
from lockstep.slurm_sweep.submit import FOLDER, check_installed, submit
from lockstep.slurm_sweep.task import SweptRun
from lockstep.sweep import compose_job

log = logging.getLogger(__name__)


@dataclass
class Job:
    number: int
    overrides: list[str]
    directory: Path = Path()
    config: DictConfig | None = None
    slurm: str | None = None
    """SLURM's name of the job, ``<job>_<task>`` in an array."""
    seen_ended: bool = False
    result: JobReturn = field(default_factory=JobReturn)

    @property
    def words(self) -> str:
        return " ".join(self.overrides)


class Sweep:
    """The jobs of one command."""

    def __init__(
        self,
        config: DictConfig,
        hydra_context: HydraContext,
        task: TaskFunction,
        launcher: Mapping[str, Any],
    ) -> None:
        self.config, self.hydra_context, self.task = config, hydra_context, task
        self.launcher = launcher
        self.directory = Path(config.hydra.sweep.dir).absolute()
        self.given: set[str] = set()
        """Directories of this command's jobs."""
        self.waiting: list[Job] = []

    def run(self, jobs: Sequence[Job]) -> None:
        """Until all have ended. Ctrl-C and SIGTERM end the jobs too; a closed session that kills
        this process leaves them to SLURM."""
        check_installed()
        check_options(self.launcher["options"])
        with unchanged_process():
            leave_on_signals()
            with self._cancelled_on_error():
                for shape, alike in self._shapes(jobs).items():
                    self._submit(alike, shape)
                while self.waiting:
                    time.sleep(self.launcher["poll_s"])
                    self._look()

    def _shapes(self, jobs: Sequence[Job]) -> dict[Shape, list[Job]]:
        """The jobs that have something to do, by what they ask for; the others are ended here."""
        found: dict[Shape, list[Job]] = {}
        for job in jobs:
            try:
                self._compose(job)
                assert job.config is not None
                shape = shape_of(job.config, self.launcher)
            except (UsageError, HydraException, OmegaConfBaseException) as error:
                log.error("#%d error: %s", job.number, error)
                where = job.directory if job.config else self.directory / str(job.number)
                record_refusal(where, job.overrides, str(error))
                job.result.status, job.result.return_value = JobStatus.FAILED, error
                continue
            if self._goes_on(job) and self._result(job)["status"] in DONE:
                log.info("#%d finished before in %s: skipped", job.number, job.directory)
                self._end(job)
            else:
                found.setdefault(shape, []).append(job)
        return found

    def _compose(self, job: Job) -> None:
        """The job's config, as that of a single run in its directory of the sweep."""
        config, place = compose_job(self.hydra_context, self.config, job.overrides, job.number)
        if place in self.given:
            place = str(next_number(self.directory))  # two jobs of one config
        self.given.add(place)
        job.directory = self.directory / place
        job.directory.mkdir(parents=True, exist_ok=True)
        with read_write(config.hydra):
            config.hydra.mode = RunMode.RUN
            config.hydra.run.dir = str(job.directory)
        config.sweep.resume = None
        job.config = config

    def _goes_on(self, job: Job) -> bool:
        return self.config.sweep.resume is not None and config_file(job.directory).exists()

    def _submit(self, jobs: Sequence[Job], shape: Shape) -> None:
        runs = []
        for job in jobs:
            assert job.config is not None
            goes_on = self._goes_on(job)
            run = SweptRun(self.hydra_context, self.task, job.overrides, job.config, goes_on)
            runs.append(run)
        names = submit(runs, shape, self.launcher, self.directory)
        for job, name in zip(jobs, names, strict=True):
            job.slurm = name
            self.waiting.append(job)
            log.info("#%d is SLURM's job %s: %s", job.number, name, job.words)

    def _look(self) -> None:
        """End the jobs that SLURM has ended. A file system may show their last words later: a job
        whose ``result.json`` is not final is looked at once more."""
        known = states()
        if known is None:
            return
        for job in list(self.waiting):
            assert job.slurm is not None
            state = known.get(job.slurm)
            if state is not None and state not in ENDED:
                continue
            if self._result(job).get("status") in (*DONE, "failed", "interrupted"):
                self._end(job)
            elif job.seen_ended:
                printed = self.directory / FOLDER / f"{job.slurm}_0_log.out"
                how = f"SLURM ended job {job.slurm} ({state or 'no longer known'})"
                record_death(job.directory, job.overrides, f"{how}; {printed} may tell more")
                self._end(job)
            job.seen_ended = True

    def _result(self, job: Job) -> Result:
        return read_result(job.directory / "result.json")

    def _end(self, job: Job) -> None:
        if job in self.waiting:
            self.waiting.remove(job)
        result = self._result(job)
        job.result.overrides, job.config = job.overrides, None
        if result["status"] in DONE:
            value = objective_value(result["objective"], result["metrics"])
            job.result.status, job.result.return_value = JobStatus.COMPLETED, value
            log.info("#%d %s; %d left", job.number, result["status"], len(self.waiting))
        else:
            error = result.get("error") or result["status"]
            job.result.status, job.result.return_value = JobStatus.FAILED, RunFailed(error)
            log.error("#%d %s: %s", job.number, result["status"], error)

    @contextmanager
    def _cancelled_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            names = [job.slurm for job in self.waiting if job.slurm]
            log.error("cancelling %d jobs", len(names))
            cancel(names)
            raise
