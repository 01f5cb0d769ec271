"""Strategy name and options -> the class; what a person may not ask for is refused here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lockstep.errors import UsageError, did_you_mean
from lockstep.exchange.async_ddp import AsyncDDPStrategy
from lockstep.exchange.hooked_ddp import HookedDDPStrategy
from lockstep.exchange.local_sgd import LocalSGDStrategy
from lockstep.exchange.parameter_server import ParameterServerStrategy
from lockstep.exchange.power_sgd_ddp import PowerSGDStrategy
from lockstep.strategies.exact_ddp import ExactDDPStrategy

CLASSES: dict[str, type[ExactDDPStrategy]] = {
    "ddp": HookedDDPStrategy,
    "ddp_find_unused_parameters_true": HookedDDPStrategy,
    "ddp_spawn": HookedDDPStrategy,
    "ddp_spawn_find_unused_parameters_true": HookedDDPStrategy,
    "ddp_async": AsyncDDPStrategy,
    "local_sgd": LocalSGDStrategy,
    "ddp_ps": ParameterServerStrategy,
}
FIXED = {"self", "module", "device_ids", "output_device", "process_group", "kwargs", "timeout"}
"""What is decided elsewhere."""


def strategy_class(name: str, options: Mapping[str, Any]) -> type[ExactDDPStrategy]:
    """The class for a strategy that trains in several processes.

    Raises `UsageError` for an option that it does not have.
    """
    chosen = CLASSES[name]
    if chosen is HookedDDPStrategy and options.get("hook") == "power_sgd":
        chosen = PowerSGDStrategy
    told = _parameters(DistributedDataParallel) | _parameters(chosen)
    known = told | _parameters(DDPStrategy)
    for key in options:
        if key in known:
            continue
        if key in ("hook", "hook_options"):
            raise UsageError(
                f"strategy.options.{key} works with trainer.strategy=ddp; {name} has its own way "
                f"of exchanging. Remove it, or use strategy=ddp."
            )
        raise UsageError(
            f"strategy.options.{key} is no option of trainer.strategy={name}."
            f"{did_you_mean(key, known)} There are: {', '.join(sorted(told))}."
        )
    return chosen


def _parameters(cls: type) -> set[str]:
    return set(inspect.signature(cls.__init__).parameters) - FIXED  # type: ignore[misc]
