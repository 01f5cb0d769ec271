"""Ask for a trial, run it as a job, tell how it ended; one after the other, or over slots."""

from __future__ import annotations

import json
import logging
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from optuna.trial import FrozenTrial, TrialState

from lockstep.errors import RunFailed, UsageError, one_line
from lockstep.record import locked, record_refusal
from lockstep.results import write_atomically
from lockstep.search.space import lowest, parse
from lockstep.search.study import (
    best_trials,
    make_pruner,
    make_sampler,
    open_study,
    overrides_of,
    tell,
)
from lockstep.slots.schedule import Job
from lockstep.sweep import RememberSweep

log = logging.getLogger(__name__)


class Search:
    """The trials of one ``python train.py -m hydra/sweeper=optuna ...``.

    A trial's number is its job's number, and so the name of its directory.
    """

    def __init__(
        self,
        config: DictConfig,
        hydra_context: HydraContext,
        launcher: Launcher,
        options: Mapping[str, Any],
    ) -> None:
        self.config, self.hydra_context, self.launcher = config, hydra_context, launcher
        self.options: dict[str, Any] = dict(options)
        self.directory = Path(config.hydra.sweep.dir)

    def run(self, overrides: Sequence[str]) -> list[FrozenTrial]:
        """Run all trials; returns the best. Raises `UsageError` for what cannot be searched, and
        `RunFailed` when no trial was good."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with locked(self.directory):
            self._prepare(overrides)
            search = getattr(self.launcher, "search", None)
            if search is not None:
                new = max(0, self.options["n_trials"] - len(self.study.trials))
                search(self._ask, self._ended, len(self.unfinished) + new)
            else:
                while (job := self._ask()) is not None:
                    self._run_alone(job)
            return self._close()

    def _prepare(self, overrides: Sequence[str]) -> None:
        options = self.options
        trials = options["n_trials"]
        if not isinstance(trials, int) or trials < 1:
            raise UsageError(f"hydra.sweeper.n_trials must be at least 1; got {trials}.")
        self.fixed, self.space = parse(overrides, self.hydra_context.config_loader)
        if not self.space:
            raise UsageError(
                "a search needs a key with a range, such as "
                "'optimizer.lr=tag(log,interval(1e-4,1e-1))'; got none."
            )
        direction = options["direction"]
        directions = [direction] if isinstance(direction, str) else list(direction)
        if options["pruner"] is not None and len(directions) > 1:
            raise UsageError("hydra.sweeper.pruner needs one objective. Use pruner=null.")
        make_pruner(options["pruner"], options["pruner_options"])  # refused now, not in a run
        self._check(directions)
        resume = self.config.sweep.resume is not None
        sampler = make_sampler(options["sampler"], options["sampler_options"], options["seed"])
        self.study = open_study(self.directory, directions, self.space, sampler, resume)
        # The same seed again would draw the first trials again.
        sampler = make_sampler(
            options["sampler"], options["sampler_options"], options["seed"] + len(self.study.trials)
        )
        self.study.sampler = sampler
        running = [trial for trial in self.study.trials if trial.state == TrialState.RUNNING]
        self.unfinished = [trial for trial in running if trial.params.keys() == self.space.keys()]
        for trial in running:
            if trial not in self.unfinished:  # ended while it was being asked for
                tell(self.study, trial.number, None, "it has not got all of its parameters")
        OmegaConf.save(self.config, self.directory / "multirun.yaml")

    def _check(self, directions: Sequence[str]) -> None:
        """One job is composed before the first trial: a typo is an error, not many failed jobs."""
        loader = self.hydra_context.config_loader
        composed = loader.load_sweep_config(self.config, [*self.fixed, *lowest(self.space)])
        objective = composed.objective
        if "test/" in str(objective):
            log.warning("the search is guided by test data; objective=val/loss is not")
        count = 1 if isinstance(objective, str) else len(objective or [])
        if count != len(directions):
            raise UsageError(
                f"hydra.sweeper.direction must have one direction for each objective; got "
                f"{', '.join(directions)} and objective={objective}."
            )

    def _ask(self) -> Job | None:
        """The next trial, those first that an earlier command did not end."""
        if self.unfinished:
            stale = self.unfinished.pop(0)
            return Job(stale.number, [*self.fixed, *overrides_of(stale.params)])
        if len(self.study.get_trials(deepcopy=False)) >= self.options["n_trials"]:
            return None
        trial = self.study.ask(self.space)
        return Job(trial.number, [*self.fixed, *overrides_of(trial.params)])

    def _run_alone(self, job: Job) -> None:
        try:
            (job.result,) = self.launcher.launch([job.overrides], initial_job_idx=job.number)
        except (UsageError, HydraException, OmegaConfBaseException) as error:
            record_refusal(self.directory / str(job.number), job.overrides, one_line(error))
            tell(self.study, job.number, None, one_line(error))
        else:
            self._ended(job)

    def _ended(self, job: Job) -> None:
        result: JobReturn = job.result
        value = result._return_value  # the property raises, and prints
        error = one_line(value) if isinstance(value, Exception) else None
        tell(self.study, job.number, value, error)

    def _close(self) -> list[FrozenTrial]:
        best = best_trials(self.study)
        states = Counter(trial.state.name.lower() for trial in self.study.trials)
        kept = [
            {
                "number": trial.number,
                "values": trial.values,
                "params": trial.params,
                "command": self._command(trial),
            }
            for trial in best
        ]
        summary = {"trials": dict(states), "best": kept}
        write_atomically(self.directory / "search.json", json.dumps(summary, indent=2) + "\n")
        if not best:
            raise RunFailed(f"none of {len(self.study.trials)} trials was finished")
        RememberSweep.best = "\n".join(map(_line, kept))
        return best

    def _command(self, trial: FrozenTrial) -> str:
        fixed = [item for item in self.fixed if not item.startswith("sweep.resume=")]
        words = [*fixed, *overrides_of(trial.params)]
        return " ".join(["python train.py", *map(shlex.quote, words)])


def _line(best: dict[str, Any]) -> str:
    values = ", ".join(f"{value:.6g}" for value in best["values"])
    return f"best: #{best['number']}  {values}\n  {best['command']}"
