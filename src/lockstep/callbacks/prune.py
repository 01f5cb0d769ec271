"""End a trial that does worse than the others of its search."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.types import RunMode
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lockstep.errors import UsageError
from lockstep.group import gather
from lockstep.record import Run

if TYPE_CHECKING:
    from optuna.trial import Trial

log = logging.getLogger(__name__)


def pruning(run: Run) -> list[Callback]:
    """What a trial of a search that prunes needs; nothing in any other run."""
    sweeper = run.hydra.get("sweeper") or {}
    if not sweeper.get("pruner") or run.hydra.get("mode") != RunMode.MULTIRUN:
        return []
    # As the study's direction is that of the objective; of test data there is nothing yet.
    metric = sweeper["prune_on"] or str(run.config.objective).replace("test/", "val/", 1)
    return [PruneTrial(run.directory.parent, run.hydra["job"]["num"], sweeper, metric)]


class PruneTrial(Callback):
    """After each validation rank 0 reports to the study and asks; all ranks do what it says."""

    def __init__(self, directory: Path, number: int, sweeper: dict[str, Any], metric: str) -> None:
        self.directory, self.number, self.sweeper = directory, number, sweeper
        self.metric = metric
        self.pruned = False
        self._trial: Trial | None = None

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        if self.metric not in trainer.callback_metrics:
            raise UsageError(
                f"hydra.sweeper.prune_on must name a metric of validation; got {self.metric!r}. "
                f"There are: {', '.join(trainer.callback_metrics)}."
            )
        value = trainer.callback_metrics[self.metric].item()
        decision = self._ask(value, trainer.current_epoch) if trainer.is_global_zero else False
        self.pruned = gather(decision)[0]
        if self.pruned:
            trainer.should_stop = True
            log.info("pruned: %s %.6g is worse than the other trials'", self.metric, value)

    def _ask(self, value: float, epoch: int) -> bool:
        from lockstep.search.study import PRUNED, make_pruner, trial_of_run

        if self._trial is None:
            pruner = make_pruner(self.sweeper["pruner"], self.sweeper["pruner_options"])
            self._trial = trial_of_run(self.directory, self.number, pruner)
        told = self._trial.study.get_trials(deepcopy=False)[self.number].intermediate_values
        if epoch not in told:  # a run that goes on may validate an epoch again
            self._trial.report(value, epoch)
        decision = self._trial.should_prune()
        if decision or self.pruned:  # trainer.min_epochs may let it go on
            self._trial.set_user_attr(PRUNED, epoch if decision else None)
        return decision
