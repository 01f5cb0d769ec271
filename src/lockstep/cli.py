"""The command line: from Hydra's composed config to a launched run, and its end in plain words."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lockstep import sweep
from lockstep.errors import RunFailed, UsageError
from lockstep.explain import explain
from lockstep.failures import PEER_DELAY_S
from lockstep.help import conf, help_text
from lockstep.hosts.meeting import PeerRefusal, tell_peers
from lockstep.launch import launch
from lockstep.prepare import overrides, prepare
from lockstep.record import Run, record_refusal
from lockstep.results import DONE, Result, objective_value, read_result
from lockstep.secrets import refuse_secrets_in_words
from lockstep.slurm.requeue import was_requeued

log = logging.getLogger(__name__)

WRONG_COMMAND_LINE = 2
"""The exit status of argparse."""
SETTINGS = "A setting is key=value, without dashes: optimizer.lr=0.1. Flags such as -m come first."


def run(
    composed: DictConfig, make_run: Callable[[DictConfig], Run] = prepare
) -> float | list[float] | None:
    """One run, from its composed config; returns the objective, for sweepers that search.

    Another ``make_run`` than `prepare` makes one that does something else than to train.
    """
    done = finished_before(composed)
    if done is not None:
        log.info("finished before in %s: skipped", done["directory"])
        return objective_value(done["objective"], done["metrics"])
    try:
        return launch(make_run(composed))
    except (UsageError, RunFailed) as error:
        record_refusal(Path(HydraConfig.get().runtime.output_dir), overrides(), str(error))
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            if isinstance(error, UsageError):
                log.error("error: %s", error)
            raise  # Hydra notes it for this job, and goes on with the next
        _exit(error)


def finished_before(composed: DictConfig) -> Result | None:
    """The result of a job of a sweep or of SLURM that goes on, when nothing is left to do."""
    directory = Path(HydraConfig.get().runtime.output_dir)
    goes_on = composed.sweep.resume is not None and HydraConfig.get().mode == RunMode.MULTIRUN
    if not (goes_on or was_requeued(directory)):
        return None
    # Its config and code have chosen the directory: `lockstep.rundir.job_directory`.
    result = read_result(directory / "result.json")
    return result if result["status"] in DONE else None


def answer_help(text: str | None = None) -> None:
    """Print the help and leave, where that is all that was asked for; None: that of training."""
    if sys.argv[1:] in (["--help"], ["-h"]):
        print(text or help_text(conf()))
        sys.exit()


@contextmanager
def readable_errors(settings: bool = True) -> Iterator[None]:
    """Around Hydra's entry point: print errors that a person can mend as one message, exit 1.

    ``settings``: whether a command line that is wrong is told how settings are given.
    Exit statuses: 1 error, 2 wrong command line, 130 Ctrl-C, 143 SIGTERM.
    """
    # Idle OpenMP threads sleep instead of spinning: with anything else on the cores, a small
    # model's steps otherwise take several times as long. Read when torch is imported, later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # What torch.distributed.launch adds to a command line says no more than the environment does.
    added = f"--local-rank={os.environ.get('LOCAL_RANK')}"
    sys.argv[:] = [word for word in sys.argv if word != added]
    given = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing
    try:
        refuse_secrets_in_words(sys.argv[1:])
        yield
        sweep.check_not_empty()
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as ended:
        unknown_flag = ended.code == WRONG_COMMAND_LINE and ended.__context__ is None
        if settings and unknown_flag:
            print(SETTINGS, file=sys.stderr)
        raise
    except (UsageError, RunFailed, HydraException, OmegaConfBaseException) as error:
        if given == "1":
            raise
        _exit(error)
    except OSError as error:
        if error.filename is None:
            raise
        _exit(
            UsageError(
                f"{error.filename} cannot be written: {error.strerror}. "
                "Use hydra.run.dir=<a directory that can be written>."
            )
        )
    finally:
        sweep.close()
        if given is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)


def _exit(error: Exception) -> NoReturn:
    kind = "failed" if isinstance(error, RunFailed) else "error"
    message = explain(error)
    if not isinstance(error, PeerRefusal | RunFailed):
        tell_peers(message)  # of a run that failed, its ranks have told each other
    elif isinstance(error, PeerRefusal) and os.environ["LOCAL_RANK"] != "0":
        time.sleep(PEER_DELAY_S)  # torchrun ends a host's ranks at the first that leaves
        sys.exit(1)
    print(f"{kind}: {message}", file=sys.stderr)
    sys.exit(1)
