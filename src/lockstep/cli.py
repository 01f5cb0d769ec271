"""The command line: from Hydra's composed config to a launched run, and errors in plain words."""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from lockstep import sweep
from lockstep.config import Config, as_config
from lockstep.errors import RunFailed, UsageError
from lockstep.failures import PEER_DELAY_S
from lockstep.help import help_text
from lockstep.hosts.agreement import agreed, restarted
from lockstep.hosts.meeting import PeerRefusal, from_rank_zero, tell_peers
from lockstep.launch import launch
from lockstep.placement import MODEL_PARALLEL, place
from lockstep.precision import check_precision
from lockstep.record import Run, Task, record_refusal
from lockstep.results import Result, objective_value, read_result
from lockstep.resume import newest_checkpoint, resumed_config
from lockstep.rundir import config_digest
from lockstep.secrets import refuse_secrets, refuse_secrets_in_words, without_secrets
from lockstep.sizes import batch_sizes, scaled_optimizer
from lockstep.slurm.requeue import was_requeued
from lockstep.trust import check_config

log = logging.getLogger(__name__)


def run(
    composed: DictConfig, prepared: Callable[[DictConfig], Run] | None = None
) -> float | list[float] | None:
    """One run, from its composed config; returns the objective, for sweepers that search.

    ``prepared`` makes the run in the place of `prepare`, to do something else than to train.
    """
    done = finished_before(composed)
    if done is not None:
        log.info("finished before in %s: skipped", done["directory"])
        return objective_value(done["objective"], done["metrics"])
    try:
        return launch((prepared or prepare)(composed))
    except (UsageError, RunFailed) as error:
        record_refusal(Path(HydraConfig.get().runtime.output_dir), _overrides(), str(error))
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
    return result if result["status"] in ("finished", "pruned") else None


def prepare(composed: DictConfig) -> Run:
    """Check a composed config and decide where it runs; raises `UsageError`."""
    hydra = HydraConfig.get()
    directory = Path(hydra.runtime.output_dir)
    config, resumed = _config_of(composed, hydra.mode, directory)
    check_config(asdict(config))
    refuse_secrets(asdict(config))
    task: Task | None = None
    if config.find is not None:
        from lockstep.find.request import finder

        config, task = finder(config, resumed)
    if config.seed is None:
        drawn = from_rank_zero("seed", lambda: str(random.SystemRandom().randrange(2**31)))
        config = replace(config, seed=int(drawn))
    elif config.seed < 0:
        raise UsageError(f"seed must be 0 or greater, or null to draw one; got {config.seed}.")
    for key, value in (
        ("trainer.accumulate_grad_batches", config.trainer.accumulate_grad_batches),
        ("strategy.timeout_s", config.strategy.timeout_s),
        ("launch.threads", config.launch.threads),
        ("launch.grace_s", config.launch.grace_s),
    ):
        if value is not None and value <= 0:
            raise UsageError(f"{key} must be greater than 0; got {value}.")
    objective = config.objective
    names = objective if isinstance(objective, list) else [objective or ""]
    if not names or not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"objective must be the name of a metric, a list of names, or null; got {objective!r}."
        )
    if config.launch.max_restarts < 0:
        restarts = config.launch.max_restarts
        raise UsageError(f"launch.max_restarts must be 0 or greater; got {restarts}.")
    placement = place(config, hydra.mode == RunMode.MULTIRUN)
    check_precision(config, placement.accelerator)
    micro_steps = config.trainer.accumulate_grad_batches
    shares = placement.world_size
    if placement.strategy in MODEL_PARALLEL:
        from lockstep.modelparallel.mesh import mesh_of

        shares = mesh_of(config, placement).data
    sizes = batch_sizes(config.data, shares, micro_steps)
    checkpoint = newest_checkpoint(directory) if resumed else None
    run = Run(
        config,
        placement,
        sizes,
        scaled_optimizer(config.optimizer, sizes.effective),
        directory,
        _overrides(),
        _plain_hydra(hydra),
        resumed=resumed,
        config_digest=config_digest(composed),
        checkpoint=checkpoint,
        task=task,
    )
    return agreed(run)


def _config_of(composed: DictConfig, mode: RunMode | None, directory: Path) -> tuple[Config, bool]:
    """The config to run, and whether it is that of a run to go on with."""
    goes_on = composed.sweep.resume is not None
    if goes_on and mode != RunMode.MULTIRUN:
        raise UsageError("sweep.resume goes on with a sweep: add -m and the sweep's overrides.")
    if goes_on and (directory / ".hydra" / "config.yaml").exists():
        return resumed_config(composed, _overrides(), directory), True
    if restarted(directory) or (composed.resume is None and was_requeued(directory)):
        return resumed_config(composed, _overrides(), directory), True
    if composed.resume is None:
        config = as_config(composed)
        if config.init_from is not None and not Path(config.init_from).is_file():
            raise UsageError(f"init_from must name a checkpoint; there is no {config.init_from}.")
        return config, False
    if mode == RunMode.MULTIRUN:
        raise UsageError(
            f"resume goes on with one run; got resume={composed.resume} in a sweep. Leave out -m."
        )
    if composed.init_from is not None:
        raise UsageError("resume and init_from exclude each other: go on, or start anew.")
    return resumed_config(composed, _overrides(), directory), True


def _overrides() -> list[str]:
    given = OmegaConf.to_container(HydraConfig.get().overrides.task)  # as typed, with its ${...}
    assert isinstance(given, list)
    return without_secrets(given)


def _plain_hydra(hydra: Any) -> dict[str, Any]:
    """Hydra's own config without interpolations, which mean nothing in another process."""
    unresolved = OmegaConf.to_container(hydra, resolve=False)
    assert isinstance(unresolved, dict)
    # These are resolved against the job's config, which is not there in another process.
    directory = Path(hydra.runtime.output_dir)
    unresolved["run"]["dir"] = str(directory)
    unresolved["sweep"] |= {"dir": str(directory.parent), "subdir": directory.name}
    resolved = OmegaConf.to_container(OmegaConf.create({"hydra": unresolved}), resolve=True)
    assert isinstance(resolved, dict)
    return dict(resolved["hydra"])


def answer_help() -> None:
    """Print the help and leave, where that is all that was asked for."""
    if sys.argv[1:] in (["--help"], ["-h"]):
        print(help_text(_conf()))
        sys.exit()


@contextmanager
def readable_errors() -> Iterator[None]:
    """Around Hydra's entry point: print errors that a person can mend as one message, exit 1.

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


def explain(error: Exception) -> str:
    """An error of Hydra or omegaconf as rule, value and repair."""
    if isinstance(error.__cause__, UsageError):
        return str(error.__cause__)  # raised by a resolver of ours
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = list(error.options or _files_of(group))
        if group:
            return (
                f"{group}={name}: there is no conf/{group}/{name}.yaml. "
                f"There are: {', '.join(options)}.{_nearest(name, options)}"
            )
    cause = error.__cause__ if isinstance(error, ConfigCompositionException) else error
    if isinstance(cause, ConfigKeyError | ValidationError) or hasattr(cause, "full_key"):
        return _explain_key(error, cause)
    if isinstance(error, OverrideParseException):
        return f"{error} A value with = , or brackets needs quotes: 'key=\"a=b\"'."
    return str(error)


def _conf() -> Path:
    """Beside train.py; ``python -m lockstep.parity`` is started beside it."""
    script = Path(sys.argv[0]).parent
    return (script if (script / "conf").is_dir() else Path()) / "conf"


def _files_of(group: str) -> list[str]:
    """Names in a folder of ``conf/``; Hydra lists them for top folders only."""
    folder = _conf() / group
    return sorted(
        path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")
    )


def _explain_key(error: Exception, cause: Any) -> str:
    key = cause.full_key or str(cause.key)
    if isinstance(cause, ValidationError):
        return f"{key}: {cause.msg.splitlines()[0] if cause.msg else cause}."
    parent = cause.parent_node
    if hasattr(parent, "keys") and key.rpartition(".")[2] not in parent:
        choices = [str(name) for name in parent]
        place = key.rpartition(".")[0] or "the config"
        last = key.rpartition(".")[2]
        shown = ", ".join(choices) or "none"
        dataclass_keys = cause.object_type not in (None, dict)
        plus = "" if dataclass_keys else f" A key that is new needs a plus: +{key}=..."
        if any(word.startswith("resume=") for word in sys.argv):
            plus = " A run that goes on keeps its model and data: leave out what does not change."
        return (
            f"{key}: {place} has no key {last!r}.{_nearest(last, choices)} It has: {shown}.{plus}"
        )
    return f"{error} {_first_line(cause)}"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _nearest(name: str, choices: list[str]) -> str:
    near = get_close_matches(name, choices, n=1, cutoff=0.5)
    return f" Did you mean {near[0]}?" if near else ""
