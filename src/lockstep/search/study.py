"""A study in a sweep's directory: what was tried, what it gave, what to try next."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import distribution_to_json
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import RDBStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from lockstep.errors import UsageError, one_line
from lockstep.search.space import Space

log = logging.getLogger(__name__)

FILE = "study.db"
NAME = "lockstep"
LOCK_TIMEOUT_S = 60
SAMPLERS = {
    "tpe": optuna.samplers.TPESampler,
    "random": optuna.samplers.RandomSampler,
    "nsgaii": optuna.samplers.NSGAIISampler,
}
PRUNERS = {
    "median": optuna.pruners.MedianPruner,
    "percentile": optuna.pruners.PercentilePruner,
    "halving": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
    "threshold": optuna.pruners.ThresholdPruner,
}
PRUNED = "pruned"
"""Attribute of a trial whose run ended itself."""


def make_sampler(name: str, options: Mapping[str, Any], seed: int) -> BaseSampler:
    sampler: BaseSampler = _made("sampler", SAMPLERS, name, {**options, "seed": seed})
    return sampler


def make_pruner(name: str | None, options: Mapping[str, Any]) -> BasePruner:
    if name is None:
        return optuna.pruners.NopPruner()
    pruner: BasePruner = _made("pruner", PRUNERS, name, options)
    return pruner


def _made(kind: str, known: Mapping[str, Any], name: str, options: Mapping[str, Any]) -> Any:
    if name not in known:
        raise UsageError(
            f"hydra.sweeper.{kind} must be one of {', '.join(known)}"
            f"{' or null' if kind == 'pruner' else ''}; got {name!r}."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            return known[name](**options)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"hydra.sweeper.{kind}_options must fit optuna's {known[name].__name__}: {error}"
        ) from None


def open_study(
    directory: Path, directions: Sequence[str], space: Space, sampler: BaseSampler, resume: bool
) -> Study:
    """The study of a sweep's directory, new or to go on with.

    Raises `UsageError` for a file that cannot be read, one that is there already when it should be
    new, and one with other ranges or directions.
    """
    for direction in directions:
        if direction not in ("minimize", "maximize"):
            raise UsageError(
                f"hydra.sweeper.direction must be minimize or maximize, or a list of these; got "
                f"{direction!r}."
            )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = directory / FILE
    if path.exists() and not resume:
        raise UsageError(
            f"{directory} holds a study already. Go on with it: sweep.resume={directory}"
        )
    directory.mkdir(parents=True, exist_ok=True)
    try:
        study = optuna.create_study(
            storage=storage(directory),
            study_name=NAME,
            directions=list(directions),  # type: ignore[arg-type]
            sampler=sampler,
            load_if_exists=resume,
        )
    except Exception as error:  # whatever sqlite, SQLAlchemy or another version's schema raise
        raise UsageError(
            f"{path} must be a study that optuna {optuna.__version__} can read: {one_line(error)} "
            "Use the version that wrote it, or `optuna storage upgrade`, or begin a new sweep."
        ) from error
    told = {
        "space": {key: distribution_to_json(item) for key, item in space.items()},
        "directions": list(directions),
    }
    for name, value in told.items():
        before = study.user_attrs.get(name, value)
        if before != value:
            raise UsageError(
                f"a search that goes on must keep its {name}; {path} has {before}, got {value}."
            )
        study.set_user_attr(name, value)
    return study


def storage(directory: Path) -> RDBStorage:
    """Many runs may report at once: each waits for the others' locks."""
    address = f"sqlite:///{directory.resolve() / FILE}"
    return RDBStorage(address, engine_kwargs={"connect_args": {"timeout": LOCK_TIMEOUT_S}})


def trial_of_run(directory: Path, number: int, pruner: BasePruner) -> Trial:
    """A trial as seen by its own run, in another process: to report to, and to ask."""
    study = optuna.load_study(study_name=NAME, storage=storage(directory), pruner=pruner)
    trial_id = study.get_trials(deepcopy=False)[number]._trial_id
    return Trial(study, trial_id)


def overrides_of(params: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in params.items()]


def tell(study: Study, number: int, value: Any, error: str | None) -> None:
    """How a trial ended. One without a number for each objective has failed; the study goes on."""
    values = list(value) if isinstance(value, Sequence) else [value]
    numbers = [item for item in values if isinstance(item, int | float) and math.isfinite(item)]
    trial = study.get_trials(deepcopy=False)[number]
    if trial.state.is_finished():
        return  # told before this command
    if error is None and trial.user_attrs.get(PRUNED) is not None:
        study.tell(number, state=TrialState.PRUNED)
    elif error is None and len(numbers) == len(values) == len(study.directions):
        study.tell(number, numbers)
    else:
        log.warning("trial %d failed: %s", number, error or f"its objective is {value}")
        study.tell(number, state=TrialState.FAIL)


def best_trials(study: Study) -> list[FrozenTrial]:
    """One, or for several objectives all that no other beats; none when none was finished."""
    if not study.get_trials(states=(TrialState.COMPLETE,)):
        return []
    return [study.best_trial] if len(study.directions) == 1 else study.best_trials
