"""Hand jobs over to SLURM: an array for all jobs that ask for the same."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.slurm_sweep.shape import Shape
from lockstep.slurm_sweep.task import SweptRun

log = logging.getLogger(__name__)

FOLDER = "slurm"
"""In the sweep's directory: submitit's scripts and pickles, and what each task has printed."""
PASSED_ON = ("cpus_per_task", "partition", "account", "qos", "setup")


def check_installed() -> None:
    """Raise `UsageError` where jobs cannot be handed over."""
    for program in ("sbatch", "squeue", "scancel"):
        if shutil.which(program) is None:
            raise UsageError(
                f"hydra/launcher=slurm needs SLURM's {program}, which is not on the PATH. Start "
                "the sweep on a login node, or leave the launcher out: jobs then run here, in turn."
            )
    try:
        import submitit  # noqa: F401
    except ModuleNotFoundError as missing:
        raise UsageError(
            f"hydra/launcher=slurm needs {missing.name}: pip install 'lockstep[slurm]'"
        ) from None


def submit(
    runs: Sequence[SweptRun], shape: Shape, launcher: Mapping[str, Any], directory: Path
) -> list[str]:
    """SLURM's names of the jobs, in order; raises `UsageError` when SLURM does not take them."""
    import submitit

    executor = submitit.SlurmExecutor(directory / FOLDER)
    executor.update_parameters(**parameters(shape, launcher))
    try:
        with executor.batch():
            jobs = [executor.submit(run) for run in runs]
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        *_, last = str(error).strip().splitlines()
        raise UsageError(
            f"SLURM does not take the jobs: {last} Mend hydra.launcher.partition, account, "
            "timeout_min, options, or what the run asks for (trainer.devices, trainer.num_nodes)."
        ) from None
    return [job.job_id for job in jobs]


def parameters(shape: Shape, launcher: Mapping[str, Any]) -> dict[str, Any]:
    """submitit's, for one array.

    The numbers of nodes and tasks are given as sbatch's own options, as submitit would otherwise
    wait for a pickle of each task. The notice before the time limit is the one that a run knows,
    not submitit's.
    """
    given = {name: launcher[name] for name in PASSED_ON if launcher[name] is not None}
    if launcher["mem_gb"] is not None:
        given["mem"] = f"{round(launcher['mem_gb'] * 1024)}M"
    own: dict[str, Any] = {
        "nodes": shape.nodes,
        "ntasks-per-node": shape.tasks_per_node,
        "signal": f"SIGUSR1@{launcher['signal_delay_s']}",
        "requeue": True,
    }
    if shape.gpus_per_node:
        own["gpus-per-node"] = shape.gpus_per_node
    srun = ["--kill-on-bad-exit=1"]
    if launcher["cpus_per_task"] is not None:
        srun.append(f"--cpus-per-task={launcher['cpus_per_task']}")  # srun no longer takes sbatch's
    return {
        "job_name": "lockstep",
        "time": launcher["timeout_min"],
        **given,
        "array_parallelism": launcher["array_parallelism"],
        "stderr_to_stdout": True,
        "srun_args": srun,
        "additional_parameters": own | dict(launcher["options"]),
    }
