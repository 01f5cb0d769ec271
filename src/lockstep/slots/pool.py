"""How many slots there are, how many a job takes, and which are free."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from lockstep.config import Config, TrainerConfig
from lockstep.devices import available, cores, visible_gpus
from lockstep.errors import UsageError
from lockstep.placement import Placement, place


class NoSuchSlots(UsageError):
    """Asked for are none, or more than there are: nothing can be started."""


@dataclass(frozen=True)
class Demand:
    """What one job asks for."""

    accelerator: str
    devices: int
    processes: int
    threads: int | None
    """Per process; None: what its slots have."""

    def slots(self, threads_per_slot: int) -> int:
        """One per device; more when its threads are more than those of its slots."""
        if self.accelerator != "cpu" or self.threads is None:
            return self.devices
        return max(self.devices, -(-self.processes * self.threads // threads_per_slot))


def demand_of(composed: DictConfig, environ: Mapping[str, str] = os.environ) -> Demand:
    """What a job's composed config asks for.

    Raises `UsageError` for what cannot be placed anywhere, and for GPUs by their ids: the ids are
    chosen by the slots.
    """
    # Not the others: they may mean this very job's directory, which is not known here.
    names = ("accelerator", "strategy", "devices", "num_nodes")
    trainer = TrainerConfig(**{name: _plain(composed.trainer[name]) for name in names})
    threads = composed.launch.threads
    placement: Placement = place(Config(trainer=trainer), sweep=True, environ=environ)
    if isinstance(placement.devices, list):
        raise UsageError(
            "hydra/launcher=slots chooses a job's GPUs, so trainer.devices must be their number; "
            f"got {placement.devices}. Use trainer.devices={len(placement.devices)}."
        )
    return Demand(placement.accelerator, placement.device_count, placement.world_size, threads)


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if isinstance(value, ListConfig) else value


class Pool:
    """The slots of one accelerator: GPUs by name, or equal shares of the CPU's cores by number.

    Raises `NoSuchSlots` for a number of them that there cannot be.
    """

    def __init__(
        self, accelerator: str, asked: Any = "auto", environ: Mapping[str, str] = os.environ
    ) -> None:
        self.accelerator, self.environ = accelerator, environ
        names = _names(accelerator, environ)
        count = len(names) if asked == "auto" else asked
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= len(names):
            what = "CPU cores" if accelerator == "cpu" else f"devices of accelerator={accelerator}"
            raise NoSuchSlots(
                f"hydra.launcher.slots must be from 1 to {len(names)}, the {what} of this machine, "
                f"or auto; got {asked!r}."
            )
        self.free = names[:count]
        self.size = count
        self.threads_per_slot = max(1, cores() // count)

    def take(self, demand: Demand) -> list[str] | None:
        """The names of the slots that a job gets; None when too few are free now.

        Raises `UsageError` when there will never be enough.
        """
        count = demand.slots(self.threads_per_slot)
        if count > self.size:
            raise UsageError(
                f"a job must fit the {self.size} slots of accelerator={self.accelerator} "
                f"({self.threads_per_slot} threads each); this one needs {count} "
                f"(trainer.devices={demand.devices} launch.threads={demand.threads}). "
                "Use fewer devices or threads, or a launcher that runs one job at a time."
            )
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give_back(self, slots: list[str]) -> None:
        self.free = sorted([*self.free, *slots], key=lambda name: (len(name), name))

    def environment(self, slots: list[str], demand: Demand) -> dict[str, str]:
        """What confines a job to its slots."""
        threads = max(1, len(slots) * self.threads_per_slot // demand.processes)
        fewer = self.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        if fewer.isdigit():
            threads = min(threads, int(fewer))
        variables = {"OMP_NUM_THREADS": str(threads)}
        if self.accelerator == "gpu":
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(slots)
        return variables


def _names(accelerator: str, environ: Mapping[str, str]) -> list[str]:
    if accelerator == "gpu" and (names := visible_gpus(environ)) is not None:
        return names
    return [str(number) for number in range(available(accelerator, environ))]
