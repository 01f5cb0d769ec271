"""Where a run is computed: the strategy, the processes, and who starts them.

`place` is a pure function of the config and the environment; its decisions are a table in
``tests/test_placement.py``. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from lockstep.config import Config, TrainerConfig
from lockstep.devices import resolve_accelerator, resolve_devices
from lockstep.errors import UsageError

Kind = Literal["here", "worker", "ranks", "launched"]

STRATEGIES: dict[str, Literal["one", "ranks", "spawn"]] = {
    "auto": "one",
    "dp": "one",
    "ddp": "ranks",
    "ddp_find_unused_parameters_true": "ranks",
    "ddp_ps": "ranks",
    "ddp_async": "ranks",
    "local_sgd": "ranks",
    "fsdp": "ranks",
    "tensor_parallel": "ranks",
    "pipeline": "ranks",
    "deepspeed": "ranks",
    "ddp_spawn": "spawn",
    "ddp_spawn_find_unused_parameters_true": "spawn",
}
"""Strategy -> who makes its processes: none needed, `lockstep.launch`, or Lightning."""
MODEL_PARALLEL = ("fsdp", "tensor_parallel", "pipeline", "deepspeed")
"""Those of `lockstep.modelparallel`, in which ranks hold parts of the network."""

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


@dataclass(frozen=True)
class Placement:
    """What was asked for, with every ``auto`` decided."""

    kind: Kind
    """``here``: this process. ``worker``: one fresh process. ``ranks``: fresh processes of ours.
    ``launched``: this process is already one rank of several."""
    strategy: str
    accelerator: str
    devices: int | list[int]
    num_nodes: int
    rank: int = 0
    """Global rank of this process; 0 unless ``launched``."""

    @property
    def device_count(self) -> int:
        return len(self.devices) if isinstance(self.devices, list) else self.devices

    @property
    def world_size(self) -> int:
        """Processes that train: 1 for one-process strategies, whatever their devices."""
        if STRATEGIES[self.strategy] == "one":
            return 1
        return self.device_count * self.num_nodes


def place(config: Config, sweep: bool, environ: Mapping[str, str] = os.environ) -> Placement:
    """Decide where this run is computed; raises `UsageError` for contradictions.

    ``sweep`` says that the run is one job of several: it then never runs in this process, so that
    nothing (seeds, threads, memory, environment) leaks from job to job.
    """
    trainer = config.trainer
    _check_name(trainer.strategy)
    if trainer.num_nodes < 1:
        raise UsageError(f"trainer.num_nodes must be at least 1; got {trainer.num_nodes}.")
    accelerator = resolve_accelerator(trainer.accelerator, environ)
    if accelerator == "mps" and trainer.accelerator == "auto" and _needs_several(trainer):
        accelerator = "cpu"  # Apple's GPU is a single device, without process groups
    devices = resolve_devices(trainer.devices, accelerator, environ)
    count = len(devices) if isinstance(devices, list) else devices
    strategy = trainer.strategy
    if strategy == "auto" and (count > 1 or trainer.num_nodes > 1):
        strategy = "ddp"
    _check_combination(strategy, accelerator, count, trainer.num_nodes)
    if trainer.sync_batchnorm and count * trainer.num_nodes > 1:
        _check_sync_batchnorm(strategy, accelerator)
    kind, rank = _who_starts(strategy, count, trainer.num_nodes, sweep, environ)
    return Placement(kind, strategy, accelerator, devices, trainer.num_nodes, rank)


def _needs_several(trainer: TrainerConfig) -> bool:
    return STRATEGIES[trainer.strategy] != "one" or trainer.devices not in (1, "1", "auto", -1)


def _check_name(strategy: str) -> None:
    if strategy in STRATEGIES:
        return
    near = get_close_matches(strategy, STRATEGIES, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise UsageError(
        f"trainer.strategy must be one of {', '.join(STRATEGIES)}; got {strategy!r}.{hint}"
    )


def _check_combination(strategy: str, accelerator: str, count: int, num_nodes: int) -> None:
    if num_nodes > 1 and STRATEGIES[strategy] != "ranks":
        raise UsageError(
            f"trainer.strategy={strategy} works on one machine; got trainer.num_nodes={num_nodes}. "
            "Use trainer.strategy=ddp, or trainer.num_nodes=1."
        )
    if accelerator == "mps" and (count > 1 or STRATEGIES[strategy] != "one"):
        raise UsageError(
            f"trainer.strategy={strategy} with {count} devices does not run on accelerator=mps, "
            "which is a single device. Use trainer.accelerator=cpu, or trainer.devices=1."
        )


def _check_sync_batchnorm(strategy: str, accelerator: str) -> None:
    if STRATEGIES[strategy] == "one" or accelerator != "gpu":
        raise UsageError(
            "trainer.sync_batchnorm=true needs ddp on GPUs: torch's SyncBatchNorm works nowhere "
            f"else; got trainer.strategy={strategy} on accelerator={accelerator}. Use "
            "trainer.sync_batchnorm=false, or GroupNorm, which needs no synchronization."
        )


def _who_starts(
    strategy: str, count: int, num_nodes: int, sweep: bool, environ: Mapping[str, str]
) -> tuple[Kind, int]:
    if all(name in environ for name in TORCHRUN_VARIABLES):
        return _under_torchrun(strategy, count, num_nodes, sweep, environ)
    tasks, in_step = int(environ.get("SLURM_NTASKS") or "1"), "SLURM_STEP_ID" in environ
    if (in_step or not sweep) and (tasks > 1 or "SLURM_JOB_ID" in environ):
        world = count * num_nodes
        if STRATEGIES[strategy] == "ranks" and max(tasks, world) > 1 and not (sweep and tasks == 1):
            return _under_slurm(count, num_nodes, sweep, environ)
        if STRATEGIES[strategy] != "ranks" and in_step and tasks > 1:
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
    if STRATEGIES[strategy] == "ranks":
        return "ranks", 0
    return ("worker" if sweep else "here"), 0


def _under_torchrun(
    strategy: str, count: int, num_nodes: int, sweep: bool, environ: Mapping[str, str]
) -> tuple[Kind, int]:
    world, local = int(environ["WORLD_SIZE"]), int(environ["LOCAL_WORLD_SIZE"])
    if STRATEGIES[strategy] == "spawn":
        raise UsageError(
            f"trainer.strategy={strategy} starts its own processes, but torchrun "
            "(TORCHELASTIC_RUN_ID is set) has started this one. Use trainer.strategy=ddp, or start "
            "with plain python."
        )
    if STRATEGIES[strategy] == "one":
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
