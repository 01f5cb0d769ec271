"""What a run asks of SLURM: nodes, tasks and GPUs, by its own config. Nothing here imports torch.

The allocation follows from ``trainer.*``, so that it cannot contradict it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from lockstep.config import Config, TrainerConfig
from lockstep.errors import UsageError
from lockstep.placement import STRATEGIES, place

DERIVED = {
    "nodes": "trainer.num_nodes",
    "ntasks": "trainer.devices and trainer.num_nodes",
    "ntasks-per-node": "trainer.devices",
    "array": "the number of jobs; hydra.launcher.array_parallelism limits how many run at once",
    "signal": "hydra.launcher.signal_delay_s",
    "time": "hydra.launcher.timeout_min",
}
"""sbatch's option -> what decides it instead."""


@dataclass(frozen=True)
class Shape:
    nodes: int
    tasks_per_node: int
    gpus_per_node: int
    """0: a run on CPUs, or GPUs are asked for in words of the cluster's own."""


def shape_of(composed: DictConfig, launcher: Mapping[str, Any]) -> Shape:
    """The allocation of one job; raises `UsageError` for a run that can have none."""
    trainer = composed.trainer
    nodes, devices = trainer.num_nodes, _device_count(trainer.devices)
    several = max(nodes, devices) > 1
    strategy = "ddp" if trainer.strategy == "auto" and several else trainer.strategy
    ranks = STRATEGIES.get(strategy) == "ranks"
    # As the first of those tasks would decide; a login node's own devices do not count.
    tasks = {"SLURM_NTASKS": str(devices * nodes if ranks else 1), "SLURM_STEP_ID": "0"}
    environ = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", **tasks}
    asked = TrainerConfig(
        accelerator="cpu", strategy=strategy, devices=devices, num_nodes=nodes, max_epochs=1
    )
    place(Config(trainer=asked), sweep=False, environ=environ)
    return Shape(nodes, devices if ranks else 1, _gpus(trainer.accelerator, devices, launcher))


def _device_count(devices: Any) -> int:
    count = int(devices) if isinstance(devices, str) and devices.isdigit() else devices
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UsageError(
            "hydra/launcher=slurm asks SLURM for trainer.devices devices on each node, so it must "
            f"be their number; got {devices}. Use for example trainer.devices=2."
        )
    return count


def _gpus(accelerator: str, devices: int, launcher: Mapping[str, Any]) -> int:
    asked = launcher["gpus_per_node"]
    if asked is None:
        elsewhere = {"gres", "gpus", "gpus-per-node", "gpus-per-task"} & set(launcher["options"])
        return devices if accelerator in ("gpu", "cuda") and not elsewhere else 0
    if asked and accelerator != "cpu" and asked < devices:
        raise UsageError(
            "hydra.launcher.gpus_per_node must be at least trainer.devices; got "
            f"{asked} and {devices}. Leave it out: it then is trainer.devices."
        )
    return int(asked)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options of sbatch that something else decides."""
    for name in options:
        if name in DERIVED:
            raise UsageError(
                f"hydra.launcher.options must leave {name} out: it follows from {DERIVED[name]}."
            )
