"""Where a run is computed: the strategy, the processes, and who starts them.

`place` is a pure function of the config and the environment; its decisions are a table in
``tests/test_placement.py``. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.config import Config, TrainerConfig
from lockstep.devices import resolve_accelerator, resolve_devices
from lockstep.errors import UsageError, did_you_mean
from lockstep.launchers import Kind, Maker, who_starts

STRATEGIES: dict[str, Maker] = {
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
"""Strategy -> who makes its processes."""
MODEL_PARALLEL = ("fsdp", "tensor_parallel", "pipeline", "deepspeed")
"""Those of `lockstep.modelparallel`, in which ranks hold parts of the network."""


@dataclass(frozen=True)
class Placement:
    """What was asked for, with every ``auto`` decided."""

    kind: Kind
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
    maker = STRATEGIES[strategy]
    kind, rank = who_starts(strategy, maker, count, trainer.num_nodes, sweep, environ)
    return Placement(kind, strategy, accelerator, devices, trainer.num_nodes, rank)


def _needs_several(trainer: TrainerConfig) -> bool:
    return STRATEGIES[trainer.strategy] != "one" or trainer.devices not in (1, "1", "auto", -1)


def _check_name(strategy: str) -> None:
    if strategy in STRATEGIES:
        return
    raise UsageError(
        f"trainer.strategy must be one of {', '.join(STRATEGIES)}; got {strategy!r}."
        f"{did_you_mean(strategy, STRATEGIES)}"
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
