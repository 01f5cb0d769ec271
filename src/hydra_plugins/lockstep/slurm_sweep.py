"""``hydra/launcher=slurm``: a sweep's jobs in SLURM's queue. Hydra finds plugins in this package.

Hydra imports this file at every start, so what does the work is imported when it is used; and it
executes it before it is a known module, which a dataclass with postponed annotations needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, configure_log, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


@dataclass
class SlurmConfig:
    """What every job of the sweep asks for; nodes, tasks and GPUs follow from ``trainer.*``."""

    _target_: str = "hydra_plugins.lockstep.slurm_sweep.SlurmLauncher"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    timeout_min: int = 240
    """Time limit of a job, in minutes; a run that reaches it goes back into the queue."""
    signal_delay_s: int = 90
    """How long before the time limit a run is told to save, in seconds."""
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    """None: ``trainer.devices`` for ``trainer.accelerator=gpu``, else none."""
    mem_gb: float | None = None
    """Memory on each node."""
    array_parallelism: int = 256
    """Jobs that run at once."""
    setup: list[str] | None = None
    """Lines of shell before the run, such as ``module load cuda``."""
    options: dict[str, Any] = field(default_factory=dict)
    """Other options of sbatch, such as ``{constraint: a100}``."""
    poll_s: float = 10.0
    """Seconds between two questions to the queue."""


ConfigStore.instance().store(
    group="hydra/launcher", name="slurm", node=SlurmConfig, provider=__package__
)


class SlurmLauncher(Launcher):
    def __init__(self, **options: Any) -> None:
        self.options: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(options))  # type: ignore[assignment]

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context, self.task_function = hydra_context, task_function
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        from lockstep.slurm_sweep.collect import Job, Sweep

        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        jobs = [Job(initial_job_idx + i, list(each)) for i, each in enumerate(job_overrides)]
        Sweep(self.config, self.hydra_context, self.task_function, self.options).run(jobs)
        return [job.result for job in jobs]
