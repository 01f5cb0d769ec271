"""What a step takes of a device's memory, and whether it has run out."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from lockstep.errors import UsageError

PROCESS = Path("/proc/self")


class Meter:
    """The most that is allocated on one of ``devices`` from `start` on.

    On a CPU it is what this process holds of the machine's memory, libraries and all: Linux's
    VmHWM, man 5 proc. Raises `UsageError` for a CPU without a limit, as its memory does not run
    out: the system ends a process instead, and not always the one that asks for too much.
    """

    def __init__(self, devices: Sequence[torch.device], limit_bytes: float | None) -> None:
        self._devices, self._limit = devices, limit_bytes
        self._kind = devices[0].type
        if self._kind == "cpu" and limit_bytes is None:
            raise UsageError(
                "find=batch needs find.limit_bytes on a CPU, whose memory does not run out: the "
                "system ends processes instead. Use for example find.limit_bytes=8e9, for each "
                "process; or trainer.accelerator=gpu."
            )
        if self._kind == "cpu" and sys.platform != "linux":
            raise UsageError(
                "find=batch on a CPU needs Linux, which tells the most that a process held; got "
                f"{sys.platform}. Use trainer.accelerator=gpu, or another machine."
            )

    def start(self) -> None:
        """Let go of what the last trial left, and count from here."""
        gc.collect()
        if self._kind == "cpu":
            (PROCESS / "clear_refs").write_text("5")
            return
        device_module = torch.get_device_module(self._kind)
        device_module.empty_cache()
        if hasattr(device_module, "reset_peak_memory_stats"):
            for device in self._devices:
                device_module.reset_peak_memory_stats(device)

    def peak_bytes(self) -> int | None:
        """None where the device does not tell: Apple's GPUs."""
        if self._kind == "cpu":
            found = re.search(r"VmHWM:\s+(\d+) kB", (PROCESS / "status").read_text())
            assert found is not None, "Linux tells it of each process"
            return int(found[1]) * 1024
        device_module = torch.get_device_module(self._kind)
        if not hasattr(device_module, "max_memory_allocated"):
            return None
        return max(int(device_module.max_memory_allocated(device)) for device in self._devices)

    def within_limit(self, peak_bytes: int | None) -> bool:
        return self._limit is None or peak_bytes is None or peak_bytes <= self._limit


def ran_out(error: RuntimeError) -> bool:
    """Apple's GPUs raise a plain RuntimeError (aten/src/ATen/mps/MPSAllocator.mm), and so does a
    CPU on which a single allocation fails (c10/core/impl/alloc_cpu.cpp)."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        text.startswith("MPS backend out of memory")
        or "DefaultCPUAllocator: can't allocate memory" in text
    )
