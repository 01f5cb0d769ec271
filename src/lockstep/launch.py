"""Give a run its processes, and write down how it ended.

`lockstep.placement.place` decides; the processes are in `lockstep.processes`.
Lightning's own script launcher is never used: it starts ranks by running the command line again,
``-m`` included, so that a sweep's ranks become sweeps of their own.
"""

from __future__ import annotations

import logging
import traceback
from dataclasses import replace

from lockstep.errors import RunFailed, UsageError, as_usage_error, one_line
from lockstep.hosts.loss import explained
from lockstep.placement import STRATEGIES
from lockstep.preload import FOR_TRAINING, preload
from lockstep.processes import context, in_ranks, in_worker, unchanged_process
from lockstep.record import Run, claimed, write_result
from lockstep.results import Result, objective_key, objective_value
from lockstep.resume import newest_checkpoint
from lockstep.signals import ignoring_signals, leave_on_signals
from lockstep.slurm.requeue import requeue_if_told
from lockstep.summary import closing_block, opening_line

log = logging.getLogger(__name__)


def launch(run: Run) -> float | list[float] | None:
    """Compute a run where its placement says; returns the objective's value.

    Raises `UsageError` for what a person can mend and `RunFailed` for everything else, after the
    traceback has been logged and ``result.json`` written.
    """
    if run.placement.rank == 0:
        with claimed(run):
            log.info(opening_line(run))
            if run.resumed:
                log.info("resuming from %s", run.checkpoint or "the start: there is no checkpoint")
            return _recorded(run)
    logging.getLogger().setLevel(logging.ERROR)  # one log, from rank zero
    return _recorded(run)


def _recorded(run: Run) -> float | list[float] | None:
    writes = run.placement.rank == 0
    try:
        outcome = {"status": "finished", **_compute(run)}
        value = _objective(run, outcome)
    except BaseException as error:
        seen = explained(run, error, _as_seen_by_a_person(error))
        if writes:
            with ignoring_signals():  # srun ends a job's last rank when the others have left
                _record_failure(run, error, seen)
                requeue_if_told(run)
        raise seen from error
    if writes:
        log.info(closing_block(write_result(run, outcome)))
    return value


def _compute(run: Run) -> Result:
    """The run's result, after as many restarts as it may have."""
    allowed = run.config.launch.max_restarts
    for restart in range(allowed + 1):
        try:
            result = _once(run)
            break
        except RunFailed as error:
            if restart == allowed:
                raise
            run = replace(run, checkpoint=newest_checkpoint(run.directory), resumed=True)
            origin = run.checkpoint or "the beginning: there is no checkpoint"
            log.warning("%s; restart %d of %d from %s", error, restart + 1, allowed, origin)
    resumed_from = str(run.checkpoint) if run.checkpoint else None
    return {**result, "restarts": restart, "resumed_from": resumed_from}


def _once(run: Run) -> Result:
    with unchanged_process():
        leave_on_signals()
        if run.placement.kind == "ranks":
            return in_ranks(work, run)
        if run.placement.kind == "worker" or run.config.launch.max_restarts:
            return in_worker(work, run)  # a process cannot outlive its own death
        return work(run)


def work(run: Run) -> Result:
    """What each process of a run does; under ``ddp_spawn`` it builds, and its children train."""
    spawns = STRATEGIES[run.placement.strategy] == "spawn"
    if spawns:
        context()  # the fork server imports torch while this process does
    preload(FOR_TRAINING)
    from lockstep.run import build_here, compute

    built = build_here(run)
    if spawns:
        from lockstep.spawn import in_spawned

        return in_spawned(built, run)
    return compute(built, run)


def _objective(run: Run, outcome: Result) -> float | list[float] | None:
    objective, metrics = run.config.objective, outcome["metrics"]
    try:
        value = objective_value(objective, metrics)
    except KeyError as unknown:
        raise UnknownObjective(
            f"objective must name a metric of the run; got {unknown}. "
            f"There are: {', '.join(metrics) or 'none'}. objective=null returns nothing.",
            outcome,
        ) from None
    if value is not None and isinstance(objective, str) and objective not in metrics:
        instead = objective_key(objective, metrics)
        log.info("nothing was tested: the objective is %s instead of %s", instead, objective)
    return value


class UnknownObjective(UsageError):
    """The run is good, only its objective's name is not; what was measured is kept."""

    def __init__(self, message: str, outcome: Result) -> None:
        super().__init__(message)
        self.outcome = outcome


def _record_failure(run: Run, error: BaseException, seen: BaseException) -> None:
    """Log the traceback unless it has been, and finish ``result.json``."""
    stopped = isinstance(seen, KeyboardInterrupt | SystemExit)
    if isinstance(seen, RunFailed) and seen is not error:
        log.error("%s", "".join(traceback.format_exception(error)).rstrip())
    outcome = error.outcome if isinstance(error, UnknownObjective) else {}
    status = "interrupted" if stopped else "failed"
    try:
        write_result(run, {**outcome, "status": status, "error": one_line(seen)})
    except OSError as problem:
        log.error("result.json could not be written: %s", problem)


def _as_seen_by_a_person(error: BaseException) -> BaseException:
    """`UsageError`, `RunFailed`, KeyboardInterrupt or SystemExit, whatever broke."""
    if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
        return KeyboardInterrupt()  # Lightning turns Ctrl-C into exit status 1
    if isinstance(error, UsageError | RunFailed | KeyboardInterrupt | SystemExit):
        return error
    return as_usage_error(error) or RunFailed(one_line(error))
