"""Who starts a run's processes: its command, torchrun or SLURM; and whether they fit the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from lockstep.errors import UsageError

Kind = Literal["here", "worker", "ranks", "launched"]
"""``here``: this process. ``worker``: one fresh process. ``ranks``: fresh processes of ours.
``launched``: this process is already one rank of several."""
Maker = Literal["one", "ranks", "spawn"]
"""Of a strategy's processes: none needed, `lockstep.launch`, or Lightning."""

TORCHRUN_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
LAUNCHER_VARIABLES = (
    "LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "TORCHELASTIC_RUN_ID",
)
LAUNCHERS = "torchrun (TORCHELASTIC_RUN_ID) or srun (SLURM_STEP_ID)"


def who_starts(
    strategy: str,
    maker: Maker,
    count: int,
    num_nodes: int,
    sweep: bool,
    environ: Mapping[str, str],
) -> tuple[Kind, int]:
    """Who starts the processes of a run, and this one's global rank.

    Raises `UsageError` for processes that do not fit the config, or that no launcher started.
    """
    if all(name in environ for name in TORCHRUN_VARIABLES):
        return _under_torchrun(strategy, maker, count, num_nodes, sweep, environ)
    tasks, in_step = int(environ.get("SLURM_NTASKS") or "1"), "SLURM_STEP_ID" in environ
    if (in_step or not sweep) and (tasks > 1 or "SLURM_JOB_ID" in environ):
        world = count * num_nodes
        if maker == "ranks" and max(tasks, world) > 1 and not (sweep and tasks == 1):
            return _under_slurm(count, num_nodes, sweep, environ)
        if maker != "ranks" and in_step and tasks > 1:
            raise UsageError(
                f"trainer.strategy={strategy} is one command, but srun started {tasks} "
                "(SLURM_NTASKS). Use trainer.strategy=ddp, or --ntasks=1."
            )
    if int(environ.get("OMPI_COMM_WORLD_SIZE") or "1") > 1:
        raise UsageError(
            f"mpirun started {environ['OMPI_COMM_WORLD_SIZE']} processes (OMPI_COMM_WORLD_SIZE), "
            "which do not form one run here. Use torchrun or srun, or plain python."
        )
    _check_leftovers(environ)
    if num_nodes > 1:
        raise UsageError(
            f"trainer.num_nodes={num_nodes} needs a launcher on every machine; none started this "
            f"process. Use torchrun --nnodes={num_nodes} --nproc-per-node={count} ... train.py."
        )
    if maker == "ranks":
        return "ranks", 0
    return ("worker" if sweep else "here"), 0


def _under_torchrun(
    strategy: str,
    maker: Maker,
    count: int,
    num_nodes: int,
    sweep: bool,
    environ: Mapping[str, str],
) -> tuple[Kind, int]:
    world, local = int(environ["WORLD_SIZE"]), int(environ["LOCAL_WORLD_SIZE"])
    if maker == "spawn":
        raise UsageError(
            f"trainer.strategy={strategy} starts its own processes, but torchrun "
            "(TORCHELASTIC_RUN_ID is set) has started this one. Use trainer.strategy=ddp, or start "
            "with plain python."
        )
    if maker == "one":
        if world > 1:
            raise UsageError(
                f"trainer.strategy={strategy} is one process, but torchrun started {world} "
                f"(WORLD_SIZE). Use trainer.strategy=ddp trainer.devices={local}, or plain python."
            )
        return ("worker" if sweep else "here"), 0
    if world % local:
        raise UsageError(
            f"All hosts must run as many processes; torchrun started {local} of {world} here "
            "(LOCAL_WORLD_SIZE, WORLD_SIZE). Use the same --nproc-per-node on every host."
        )
    if (count, count * num_nodes) != (local, world):
        raise UsageError(
            f"torchrun started {world} processes, {local} on this machine (WORLD_SIZE, "
            f"LOCAL_WORLD_SIZE), but the config asks for {count * num_nodes} "
            f"(trainer.devices={count} trainer.num_nodes={num_nodes}). Use "
            f"trainer.devices={local} trainer.num_nodes={world // local}."
        )
    _check_no_sweep(sweep, "torchrun")
    return "launched", int(environ["RANK"])


def _check_no_sweep(sweep: bool, launcher: str) -> None:
    if sweep:
        raise UsageError(
            f"A sweep (-m) starts fresh processes for each job, but {launcher} has started these. "
            "Use plain python: python train.py -m ..."
        )


def _under_slurm(
    count: int, num_nodes: int, sweep: bool, environ: Mapping[str, str]
) -> tuple[Kind, int]:
    tasks, world = environ.get("SLURM_NTASKS", "1"), count * num_nodes
    wanted = f"--nodes={num_nodes} --ntasks-per-node={count}"
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        raise UsageError(
            "In a SLURM allocation srun makes the processes, but it did not start this one "
            f"(SLURM_STEP_ID is not set); the config asks for {world}, the allocation is for "
            f"{tasks} (SLURM_NTASKS). Ask sbatch or salloc for {wanted}, and put srun before the "
            "command: srun python train.py ..."
        )
    even = str(count) if num_nodes == 1 else f"{count}(x{num_nodes})"
    layout = environ.get("SLURM_STEP_TASKS_PER_NODE", even)
    if (tasks, layout) != (str(world), even):
        raise UsageError(
            f"srun started {tasks} processes (SLURM_NTASKS), {layout} per node, but the config "
            f"asks for {world} (trainer.devices={count} trainer.num_nodes={num_nodes}). Use "
            f"{wanted}, or set trainer.devices to the tasks per node and trainer.num_nodes to the "
            "nodes."
        )
    _check_no_sweep(sweep, "srun")
    return "launched", int(environ["SLURM_PROCID"])


def _check_leftovers(environ: Mapping[str, str]) -> None:
    stale = [name for name in LAUNCHER_VARIABLES if name in environ]
    if stale:
        raise UsageError(
            f"{', '.join(f'{name}={environ[name]}' for name in stale)} is set, but no launcher "
            f"started this process ({LAUNCHERS} would be). Left over from another run? "
            f"Use: unset {' '.join(stale)}"
        )
