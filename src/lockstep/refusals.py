"""What Lightning's Trainer refuses, told by the key of the config that it stands in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from lockstep.config import TrainerConfig
from lockstep.errors import UsageError

AMOUNT = "It must be a whole number of batches, or a share of them from 0.0 to 1.0."
RULES = {
    "limit_train_batches": AMOUNT,
    "limit_val_batches": AMOUNT,
    "limit_test_batches": AMOUNT,
    "limit_predict_batches": AMOUNT,
    "overfit_batches": AMOUNT,
    "fast_dev_run": "It must be true, false or a number of batches.",
    "max_time": "It must be DD:HH:MM:SS, or a mapping such as {hours: 1, minutes: 30}.",
}
"""Where Lightning's own message does not tell what an argument may be."""


@contextmanager
def refusals_named(trainer: TrainerConfig) -> Iterator[None]:
    """Around the making of a Trainer: `UsageError` with the arguments that it refuses."""
    try:
        yield
    except (MisconfigurationException, ValueError, TypeError, AttributeError) as error:
        refused = _refused_arguments(trainer, error)
        if not refused:
            raise
        rules = [RULES[name] for name in refused if name in RULES]
        shown = " ".join(f"trainer.{name}={getattr(trainer, name)}" for name in refused)
        raise UsageError(
            f"{shown} is refused by Lightning: {' '.join([*rules, str(error)])}"
        ) from error


def _refused_arguments(trainer: TrainerConfig, error: Exception) -> list[str]:
    """Those that the message names; else those that are refused on their own, too."""
    default = TrainerConfig()
    mine = {
        item.name: getattr(trainer, item.name)
        for item in fields(TrainerConfig)
        if getattr(trainer, item.name) != getattr(default, item.name)
    }
    named = [name for name in mine if re.search(rf"\b{name}\b", str(error))]
    return named or [name for name, value in mine.items() if _is_refused(name, value, error)]


def _is_refused(name: str, value: Any, error: Exception) -> bool:
    if name in ("accelerator", "strategy", "devices", "plugins"):
        return False
    alone = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    try:
        Trainer(**{**alone, name: value})
    except type(error):
        return True
    return False
