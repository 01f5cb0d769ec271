"""``hydra/sweeper=optuna``: a search instead of a grid. Hydra finds plugins in this package.

Hydra imports this file at every start, so what does the work is imported when it is used; and it
executes it before it is a known module, which a dataclass with postponed annotations needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


@dataclass
class OptunaConfig:
    _target_: str = "hydra_plugins.lockstep.search.OptunaSweeper"
    n_trials: int = 20
    """Trials in all, with those of the sweep that this one goes on with."""
    direction: Any = "minimize"
    """minimize, maximize, or a list of them: one for each of a list of objectives."""
    sampler: str = "tpe"
    sampler_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of Optuna's class, such as ``n_startup_trials`` of tpe."""
    seed: int = 0
    """Of the sampler; the runs have ``seed``."""
    pruner: Any = None
    """median, percentile, halving, hyperband, threshold; null: no trial ends early."""
    pruner_options: dict[str, Any] = field(default_factory=dict)
    prune_on: Any = None
    """The metric that is reported after each epoch's validation; null: the objective, ``val/`` for
    ``test/``."""
    params: dict[str, str] = field(default_factory=dict)
    """Key -> range, for a search that is kept in a file; the command line comes after them."""


ConfigStore.instance().store(
    group="hydra/sweeper", name="optuna", node=OptunaConfig, provider=__package__
)


class OptunaSweeper(Sweeper):
    def __init__(self, **options: Any) -> None:
        self.options: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(options))  # type: ignore[assignment]

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        try:
            from lockstep.search.run import Search
        except ModuleNotFoundError as missing:
            from lockstep.errors import UsageError

            raise UsageError(
                f"hydra/sweeper=optuna needs {missing.name}: pip install 'lockstep[search]'"
            ) from None

        overrides: Sequence[str] = [f"{k}={v}" for k, v in self.options["params"].items()]
        assert self.config is not None
        assert self.hydra_context is not None
        assert self.launcher is not None
        search = Search(self.config, self.hydra_context, self.launcher, self.options)
        return search.run([*overrides, *arguments])
