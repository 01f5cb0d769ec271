"""What Lightning is told about the processes of a run: who made them, and where they meet."""

from __future__ import annotations

import os

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from typing_extensions import override

from lockstep.placement import STRATEGIES, Placement

FIRST_PORT, PORTS = 15_000, 10_000


def cluster_environment(placement: Placement) -> list[ClusterEnvironment]:
    """The Trainer's plugin where SLURM's variables are set; empty: Lightning finds out by itself.

    By itself it would take each process in a SLURM job for a rank, one of a single process too, and
    none in an interactive allocation: it goes by the job's name.
    """
    if "SLURM_JOB_ID" not in os.environ or TorchElasticEnvironment.detect():
        return []
    if placement.kind == "launched":
        return [StepEnvironment()]
    return [] if STRATEGIES[placement.strategy] == "spawn" else [LightningEnvironment()]


class StepEnvironment(SLURMEnvironment):
    """The ranks are the tasks of a job step; `lockstep.placement` has checked how many."""

    def __init__(self) -> None:
        super().__init__(auto_requeue=False)  # `lockstep.slurm.requeue` does it

    @property
    @override
    def main_port(self) -> int:
        """Of each step, not of each job: two steps of a job may run at once on one node."""
        job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"])
        port = os.environ.setdefault("MASTER_PORT", str(FIRST_PORT + (job + 101 * step) % PORTS))
        return int(port)

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """By the job's variables, which a step may differ from."""

    @staticmethod
    @override
    def _validate_srun_variables() -> None:
        """It demands ``--ntasks-per-node`` where ``--ntasks`` says the same."""
