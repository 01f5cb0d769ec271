"""Which job runs when: as many at once as the slots allow, in order as far as they fit."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, read_write
from omegaconf.errors import OmegaConfBaseException

from lockstep.errors import RunFailed, UsageError
from lockstep.processes import unchanged_process
from lockstep.record import record_death, record_refusal
from lockstep.results import DONE, read_result
from lockstep.rundir import next_number
from lockstep.signals import leave_on_signals, stop
from lockstep.slots.board import Board
from lockstep.slots.host import Ended, Host
from lockstep.slots.pool import Demand, NoSuchSlots, Pool, demand_of
from lockstep.sweep import compose_job

log = logging.getLogger(__name__)

TICK_S = 1.0
LOOKED_AT = 50
"""Jobs among which one that fits is looked for; composing a job takes some 30 ms."""
Source = Callable[[], "Job | None"]
"""The next job; None: there is none now."""


@dataclass
class Job:
    number: int
    overrides: list[str]
    config: DictConfig | None = None
    directory: Path = Path()
    demand: Demand | None = None
    slots: list[str] = field(default_factory=list)
    host: Host | None = None
    result: JobReturn = field(default_factory=JobReturn)

    @property
    def words(self) -> str:
        return " ".join(self.overrides)


class Schedule:
    """Runs the jobs of ``source`` and tells ``finished`` of each as it ends.

    ``ahead`` jobs are taken from the source before the slots for them are free: with all of them
    the first that fits is started, a search wants to know the results first.
    """

    def __init__(
        self,
        config: DictConfig,
        hydra_context: HydraContext,
        task: TaskFunction,
        slots: Any,
        source: Source,
        finished: Callable[[Job], None],
        ahead: int | None = None,
    ) -> None:
        self.config, self.hydra_context, self.task = config, hydra_context, task
        self.asked, self.source, self.finished = slots, source, finished
        self.ahead = ahead or LOOKED_AT
        self.directory = Path(config.hydra.sweep.dir).absolute()  # a job may change its own
        self.given: set[str] = set()
        """Directories of this command's jobs."""
        self.pools: dict[str, Pool] = {}
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.idle: list[Host] = []

    def run(self, total: int) -> None:
        with unchanged_process():
            leave_on_signals()
            stop.deferred = True  # to where nothing is half done: `_wait`
            with Board(total) as self.board, self._no_host_left():
                self._start()
                while self.running:
                    self._wait()
                    self._start()
            stop.leave_if_asked()

    def _start(self) -> None:
        """Start every job that fits what is free, the earlier first."""
        while True:
            job = self._next_that_fits()
            if job is None:
                return
            assert job.demand is not None
            pool = self.pools[job.demand.accelerator]
            self.idle = [host for host in self.idle if host.process.is_alive()]
            if not self.idle:
                log_file = self.directory / "hosts.log"
                self.idle.append(Host(self.hydra_context, self.task, log_file))
            job.host = self.idle.pop()
            assert job.config is not None
            job.host.start(job.config, pool.environment(job.slots, job.demand), job.directory)
            self.running.append(job)
            self.board.started(job.number, job.words, job.slots)

    def _next_that_fits(self) -> Job | None:
        for job in self._candidates():
            try:
                pool = self._pool_of(job)
                job.slots = pool.take(self._demand(job)) or []
            except (UsageError, HydraException, OmegaConfBaseException) as error:
                if isinstance(error, NoSuchSlots) and not self.running:
                    raise
                self.waiting.remove(job)
                self._refuse(job, error)
            if job.slots:
                self.waiting.remove(job)
                return job
        return None

    def _candidates(self) -> Iterator[Job]:
        """The jobs that wait, then new ones, each looked at only when it is needed."""
        yield from list(self.waiting)
        while len(self.waiting) < self.ahead:
            if self.pools and not any(pool.free for pool in self.pools.values()):
                return
            job = self.source()
            if job is None:
                return
            self.waiting.append(job)
            yield job

    def _demand(self, job: Job) -> Demand:
        if job.demand is None:
            config = self._compose(job)
            if config.sweep.resume is not None and self._is_done(job.directory.name):
                job.demand = Demand(next(iter(self.pools), "cpu"), 1, 1, None)  # it is only read
            else:
                job.demand = demand_of(config)
        return job.demand

    def _pool_of(self, job: Job) -> Pool:
        kind = self._demand(job).accelerator
        if kind not in self.pools:
            self.pools[kind] = Pool(kind, self.asked)
            self.board.slots = sum(pool.size for pool in self.pools.values())
        return self.pools[kind]

    def _refuse(self, job: Job, error: Exception) -> None:
        if job.directory == Path():
            job.directory = self.directory / str(job.number)
        record_refusal(job.directory, job.overrides, str(error))
        log.error("#%d error: %s", job.number, error)
        self._end(job, Ended(error=str(error), usage=True))

    def _compose(self, job: Job) -> DictConfig:
        """The job's config, and its directory: decided here, where no two jobs decide at once."""
        config, place = compose_job(self.hydra_context, self.config, job.overrides, job.number)
        if place in self.given and config.sweep.resume is not None and not self._is_done(place):
            place = str(next_number(self.directory))  # given a moment ago, and still empty
        self.given.add(place)
        with read_write(config.hydra):
            config.hydra.sweep.dir = str(self.directory)
            config.hydra.sweep.subdir = place
        job.config, job.directory = config, self.directory / place
        job.directory.mkdir(parents=True, exist_ok=True)
        return config

    def _is_done(self, place: str) -> bool:
        return read_result(self.directory / place / "result.json").get("status") in DONE

    def _wait(self) -> None:
        """Until a job has ended, or for a moment."""
        by_handle: dict[Any, Job] = {}
        for job in self.running:
            assert job.host is not None
            by_handle[job.host.connection] = by_handle[job.host.process.sentinel] = job
        stop.leave_if_asked()
        ready = wait(list(by_handle), timeout=TICK_S)
        stop.deferred = True
        for job in {id(by_handle[handle]): by_handle[handle] for handle in ready}.values():
            host, demand = job.host, job.demand
            assert host is not None
            assert demand is not None
            self.running.remove(job)
            ended = host.ended()
            self.pools[demand.accelerator].give_back(job.slots)
            if host.process.exitcode is None:
                self.idle.append(host)
            if ended.error is not None and not ended.usage:  # else it may be another job's
                record_death(job.directory, job.overrides, ended.error)
            self._end(job, ended)
        self.board.tick()

    def _end(self, job: Job, ended: Ended) -> None:
        job.result.overrides = job.overrides
        job.result.status = JobStatus.COMPLETED if ended.error is None else JobStatus.FAILED
        error = UsageError if ended.usage else RunFailed
        job.result.return_value = ended.value if ended.error is None else error(ended.error)
        self.board.ended(job.number, job.words, ended.error, job.directory)
        self.finished(job)
        job.config = None  # a long sweep would keep all of them; they are in files

    @contextmanager
    def _no_host_left(self) -> Iterator[None]:
        """However this ends: hosts get the signal that this process got, and time to save."""
        try:
            yield
        except BaseException:
            for job in self.running:
                assert job.host is not None
                job.host.signal(stop.asked or signal.SIGTERM)
            raise
        finally:
            grace = 5.0 + max((self._grace_s(job) for job in self.running), default=0.0)
            until = time.monotonic() + grace
            hosts: Sequence[Host] = [*self.idle, *(job.host for job in self.running if job.host)]
            for host in hosts:
                host.dismiss()
            for host in hosts:
                host.end(max(0.0, until - time.monotonic()))
            for job in self.running:
                record_death(job.directory, job.overrides, "its processes had to be killed")

    @staticmethod
    def _grace_s(job: Job) -> float:
        return float(job.config.launch.grace_s) if job.config is not None else 0.0
