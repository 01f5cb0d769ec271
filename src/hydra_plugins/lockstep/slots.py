"""``hydra/launcher=slots``: several jobs of a sweep at once. Hydra finds plugins in this package.

Hydra imports this file at every start, so what does the work is imported when it is used; and it
executes it before it is a known module, which a dataclass with postponed annotations needs.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, configure_log, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from lockstep.slots.schedule import Job, Schedule


@dataclass
class SlotsConfig:
    _target_: str = "hydra_plugins.lockstep.slots.SlotsLauncher"
    slots: Any = "auto"
    """Jobs of one device that run at once; auto: a slot for each GPU, or for each CPU core."""


ConfigStore.instance().store(
    group="hydra/launcher", name="slots", node=SlotsConfig, provider=__package__
)


class SlotsLauncher(Launcher):
    def __init__(self, slots: Any = "auto") -> None:
        self.slots = slots

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context, self.task_function = hydra_context, task_function
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        from lockstep.slots.schedule import Job

        jobs = [Job(initial_job_idx + i, list(each)) for i, each in enumerate(job_overrides)]
        waiting = iter(jobs)
        self.schedule(lambda: next(waiting, None), lambda _: None).run(len(jobs))
        return [job.result for job in jobs]

    def search(
        self, ask: "Callable[[], Job | None]", tell: "Callable[[Job], None]", total: int
    ) -> None:
        """Run the jobs of a sweeper that decides on the next when it has seen others' results."""
        self.schedule(ask, tell, ahead=1).run(total)

    def schedule(
        self,
        ask: "Callable[[], Job | None]",
        tell: "Callable[[Job], None]",
        ahead: int | None = None,
    ) -> "Schedule":
        from lockstep.errors import UsageError
        from lockstep.slots.schedule import Schedule

        if "fork" not in multiprocessing.get_all_start_methods():
            raise UsageError(
                "hydra/launcher=slots needs a system that can fork processes, such as Linux or "
                "macOS; this one cannot. Leave it out: jobs then run one after the other."
            )
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        where = (self.config, self.hydra_context, self.task_function, self.slots)
        return Schedule(*where, ask, tell, ahead)
