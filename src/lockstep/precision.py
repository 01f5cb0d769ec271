"""Precisions that would not be computed as they are named; imports no torch."""

from __future__ import annotations

from lockstep.config import Config
from lockstep.errors import UsageError

HALF_MIXED = ("16-mixed", "16", 16)


def check_precision(config: Config, accelerator: str) -> None:
    """Refuse fp16 autocast on a CPU: Lightning warns, and computes in bf16-mixed instead."""
    precision = config.trainer.precision
    if accelerator == "cpu" and precision in HALF_MIXED:
        raise UsageError(
            "trainer.precision=16-mixed needs a GPU: CPUs have no autocast to fp16; got "
            f"trainer.precision={precision} on accelerator=cpu. Use trainer.precision=bf16-mixed."
        )
