"""Fresh processes for a run: one worker, or n ranks under torch's elastic agent.

Both come from a fork server that has imported torch and Lightning once and touched no device, so
that every process after the first starts in milliseconds. Where there is none (Windows), they are
spawned.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Literal

from lockstep.console import redirect_if_told
from lockstep.failures import end_left_behind, noting_failure, raise_cause, sign_in
from lockstep.preload import FOR_RANKS, preload
from lockstep.record import Run
from lockstep.results import Result
from lockstep.signals import (
    STOPPING,
    ignoring_signals,
    leave_on_signals,
    leave_with_parent,
    own_group,
    stop,
)

log = logging.getLogger(__name__)

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "LOCAL_", "TORCHELASTIC_")
RESTORED = [*STOPPING, *([signal.SIGQUIT] if hasattr(signal, "SIGQUIT") else [])]
Work = Callable[[Run], Result]


def start_method() -> Literal["forkserver", "spawn"]:
    """The fork server has imported torch already; a spawned interpreter imports it again."""
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def context() -> BaseContext:
    """Processes start from here; the first call starts the fork server, which imports meanwhile."""
    if start_method() == "forkserver":
        from multiprocessing import forkserver, resource_tracker

        multiprocessing.set_forkserver_preload(["lockstep.forkserver"])
        with ignoring_signals():
            resource_tracker.ensure_running()
            forkserver.ensure_running()
    return multiprocessing.get_context(start_method())


def in_worker(work: Work, run: Run) -> Result:
    """``work(run)`` in one fresh process, with none of an agent's environment variables."""
    started = context()
    with tempfile.TemporaryDirectory(prefix="lockstep-") as notes:
        receive, send = started.Pipe(duplex=False)
        arguments = (work, run, dict(os.environ), notes, send)
        process = started.Process(target=_worker_main, args=arguments)  # type: ignore[attr-defined]
        process.start()
        send.close()
        result: Result | None = None
        try:
            wait([receive, process.sentinel])
            with suppress(EOFError):  # it ended without a result
                result = receive.recv() if receive.poll() else None
            process.join()
        finally:
            _stop(process, run.config.launch.grace_s)
            end_left_behind(Path(notes))
        if result is None:
            raise_cause(Path(notes), {0: process.exitcode or 0})
            raise AssertionError("a worker without a result has failed")
        return result


def in_ranks(work: Work, run: Run) -> Result:
    """``work(run)`` in ``world_size`` fresh processes of one group; returns rank 0's result."""
    context()
    preload(FOR_RANKS)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from lockstep import rendezvous

    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # `raise_cause` says it, once
    handled = ",".join(number.name for number in STOPPING)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = f"{handled},SIGQUIT"
    environ = rendezvous.of_one_machine(os.environ)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as notes:
        agent = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=run.placement.world_size,
            run_id=uuid.uuid4().hex,
            rdzv_backend=rendezvous.register(),
            max_restarts=0,
            monitor_interval=0.05,
            start_method=start_method(),
            logs_specs=DefaultLogsSpecs(log_dir=notes),
            shutdown_timeout=max(1, round(run.config.launch.grace_s)),
        )
        try:
            results = elastic_launch(agent, _rank_main)(work, run, environ, notes)
        except ChildFailedError as error:
            exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            raise_cause(Path(notes), exit_codes)
        except SignalException as stopped:
            stop.asked = stopped.sigval
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + signal.SIGTERM) from None
        finally:
            end_left_behind(Path(notes))
        first: Result = results[0]
        return first


def _worker_main(
    work: Work, run: Run, environ: dict[str, str], notes: str, send: Connection
) -> None:
    os.environ.clear()
    os.environ.update(environ)
    send.send(guarded(work, run, rank=0, notes=notes))


def _rank_main(work: Work, run: Run, environ: dict[str, str], notes: str) -> Result:
    mine = {name: text for name, text in os.environ.items() if name.startswith(RANK_VARIABLES)}
    os.environ.clear()
    os.environ.update(environ | mine)
    return guarded(work, run, rank=int(os.environ["RANK"]), notes=notes)


def guarded(work: Work, run: Run, rank: int, notes: str) -> Result:
    redirect_if_told()
    with noting_failure(run, Path(notes), rank):
        own_group()
        leave_on_signals()
        sign_in(Path(notes), rank)
        leave_with_parent(run.config.launch.grace_s)
        if run.config.data.num_workers and multiprocessing.get_start_method() == "forkserver":
            context()  # loader processes will start from it: torch is imported once, and meanwhile
        configure_logging(run, rank)
        return work(run)


def configure_logging(run: Run, rank: int) -> None:
    """Hydra's config and the job's log, as in the launching process; only rank zero speaks."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.utils import configure_log
    from omegaconf import OmegaConf

    hydra = OmegaConf.create({"hydra": run.hydra})
    # set_config would want Hydra's own classes back
    HydraConfig.instance().cfg = hydra  # type: ignore[assignment]
    if rank == 0:
        configure_log(hydra.hydra.job_logging, hydra.hydra.verbose)
    else:
        logging.getLogger().setLevel(logging.ERROR)


def _stop(process: multiprocessing.process.BaseProcess, grace_s: float) -> None:
    """End a process in order, or at once when it takes too long or Ctrl-C comes again."""
    try:
        if process.is_alive():
            process.terminate()
            process.join(grace_s)
    finally:
        if process.is_alive():
            process.kill()
            process.join()


@contextmanager
def unchanged_process() -> Iterator[None]:
    """Undo what a run leaves here: the agent's and Lightning's environment variables and signal
    handlers, which the next run would take for a launcher's."""
    environ = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in RESTORED}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environ)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if handler is not None:  # None: not set from Python
                    signal.signal(number, handler)
