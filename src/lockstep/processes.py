"""Fresh processes for a run: one worker, or n ranks under torch's elastic agent.

Both come from a fork server that has imported torch and Lightning once and touched no device, so
that every process after the first starts in milliseconds. Where there is none (Windows), they are
spawned.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path

from lockstep.errors import RunFailed, UsageError, as_usage_error, one_line
from lockstep.record import Result, Run, write_atomically
from lockstep.signals import (
    STATUSES,
    STOPPING,
    ignoring_signals,
    leave_on_signals,
    leave_with_parent,
    own_group,
    stop,
)

log = logging.getLogger(__name__)

PRELOAD = [
    "lockstep.run",
    "torch.distributed.elastic.multiprocessing.api",
    "numpy",
]
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "LOCAL_", "TORCHELASTIC_")
PEER_DELAY_S = 0.5
RESTORED = [*STOPPING, *([signal.SIGQUIT] if hasattr(signal, "SIGQUIT") else [])]
Work = Callable[[Run], Result]


def method() -> str:
    methods = multiprocessing.get_all_start_methods()
    return "forkserver" if "forkserver" in methods else "spawn"


def context() -> BaseContext:
    """Processes start from here; the first call starts the fork server, which imports meanwhile."""
    if method() == "forkserver":
        from multiprocessing import forkserver, resource_tracker

        multiprocessing.set_forkserver_preload(PRELOAD)
        with ignoring_signals():
            resource_tracker.ensure_running()
            forkserver.ensure_running()
    return multiprocessing.get_context(method())


@dataclass(frozen=True)
class Failure:
    """Why a rank ended, as it crosses from the rank to the launching process."""

    rank: int
    time: float
    summary: str
    traceback: str
    usage: bool
    """The summary says it all: a person can mend it without the traceback."""
    stopped: int | None = None
    """The signal that told this rank, and no other process, to stop."""


def in_worker(work: Work, run: Run) -> Result:
    """``work(run)`` in one fresh process, with none of an agent's environment variables."""
    started = context()
    with tempfile.TemporaryDirectory(prefix="lockstep-") as notes:
        receive, send = started.Pipe(duplex=False)
        arguments = (work, run, dict(os.environ), notes, send)
        process = started.Process(target=_worker_main, args=arguments)  # type: ignore[attr-defined]
        process.start()
        send.close()
        try:
            wait([receive, process.sentinel])
            result: Result | None = receive.recv() if receive.poll() else None
            process.join()
        except EOFError:  # it ended without a result
            process.join()
            result = None
        finally:
            _stop(process, run.config.launch.grace_s)
            _end_left_behind(Path(notes))
        if result is None:
            raise_cause(Path(notes), {0: process.exitcode or 0})
            raise AssertionError("a worker without a result has failed")
        return result


def in_ranks(work: Work, run: Run) -> Result:
    """``work(run)`` in ``world_size`` fresh processes of one group; returns rank 0's result."""
    context()
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # `raise_cause` says it, once
    handled = ",".join(number.name for number in STOPPING)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = f"{handled},SIGQUIT"
    with tempfile.TemporaryDirectory(prefix="lockstep-") as notes:
        agent = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=run.placement.world_size,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.05,
            start_method=method(),
            logs_specs=DefaultLogsSpecs(log_dir=notes),
            shutdown_timeout=max(1, round(run.config.launch.grace_s)),
        )
        try:
            results = elastic_launch(agent, _rank_main)(work, run, dict(os.environ), notes)
        except ChildFailedError as error:
            exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            raise_cause(Path(notes), exit_codes)
        except SignalException as stopped:
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + signal.SIGTERM) from None
        finally:
            _end_left_behind(Path(notes))
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
    with noting_failure(run, Path(notes), rank):
        own_group()
        leave_on_signals()
        (Path(notes) / f"rank{rank}.pid").write_text(str(os.getpid()))
        stop.peers_are_well = lambda: _peers_are_well(Path(notes))
        leave_with_parent(run.config.launch.grace_s)
        if run.config.data.num_workers and multiprocessing.get_start_method() == "forkserver":
            context()  # loader processes will start from it: torch is imported once, and meanwhile
        configure_logging(run, rank)
        return work(run)


def _peers_are_well(notes: Path) -> bool:
    """No rank of this run has failed or is gone: a signal then means this run, not a failure."""
    return not any(notes.glob("rank*.json")) and all(map(_is_alive, _pids(notes)))


def _pids(notes: Path) -> list[int]:
    return [int(path.read_text() or 0) for path in notes.glob("rank*.pid")]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _end_left_behind(notes: Path) -> None:
    """Ranks whose fork server was killed look as if they had ended."""
    for pid in filter(_is_alive, _pids(notes)):
        os.kill(pid, signal.SIGKILL)


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


@contextmanager
def noting_failure(run: Run, notes: Path, rank: int) -> Iterator[None]:
    """Write down why this rank failed, then leave with status 1."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if stop.asked is None:
            raise
        if _peers_are_well(notes):
            _note(notes, Failure(rank, time.time(), "was told to stop", "", False, stop.asked))
        sys.exit(stop.status)
    except BaseException as error:
        usage = as_usage_error(error)
        summary = one_line(usage or error)
        text = traceback.format_exc()
        _note(notes, Failure(rank, time.time(), summary, text, usage is not None))
        # A rank that was killed breaks its peers' connections at once: let the agent, which looks
        # every 0.05 s, see it before it sees them.
        time.sleep(PEER_DELAY_S if run.placement.world_size > 1 else 0)
        sys.exit(1)


def _note(notes: Path, failure: Failure) -> None:
    write_atomically(notes / f"rank{failure.rank}.json", json.dumps(asdict(failure)))


def raise_cause(notes: Path, exit_codes: dict[int, int]) -> None:
    """Log the failure that came first and raise it: `UsageError`, `RunFailed`, or what ends this
    process as the signal did that a rank was sent.

    A rank that was killed leaves no note, and its peers' notes only tell of a lost connection; so
    a killed rank comes before any note. SIGTERM is what this process sends to the others.
    """
    failures = sorted(
        (Failure(**json.loads(path.read_text())) for path in notes.glob("rank*.json")),
        key=lambda failure: failure.time,
    )
    noted = {failure.rank for failure in failures}
    silent = {
        rank: code
        for rank, code in exit_codes.items()
        if rank not in noted and code not in (0, -signal.SIGTERM, *STATUSES)
    }
    if silent and set(silent.values()) == {255} and len(silent) == len(exit_codes):
        raise RunFailed("the fork server that the run's processes came from is gone (killed?)")
    if silent:
        rank, code = next(iter(silent.items()))
        message = f"rank {rank} {_describe_exit(code)}"
        log.error(message)
        raise RunFailed(message)
    if not failures:
        raise RunFailed(f"the processes ended without a result; exit statuses {exit_codes}")
    first = failures[0]
    if first.stopped == signal.SIGINT:
        raise KeyboardInterrupt
    if first.stopped is not None:
        raise SystemExit(128 + signal.SIGTERM)
    if first.usage:
        raise UsageError(first.summary)
    log.error("rank %d failed:\n%s", first.rank, first.traceback.rstrip())
    raise RunFailed(f"rank {first.rank}: {first.summary}")


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"left with exit status {code} in the middle of the run"
    hint = " (is the machine out of memory?)" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"


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
