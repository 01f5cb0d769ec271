"""How many devices there are and how many a run asked for, without importing torch."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

from lockstep.errors import UsageError

ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")


def nvidia_gpus(environ: Mapping[str, str]) -> int:
    """GPUs that this process may use: those of the driver that CUDA_VISIBLE_DEVICES names."""
    visible, known = visible_gpus(environ), driver_gpus()
    return known if visible is None or not known else len(visible)


def visible_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES names, but for numbers that the driver has no GPU for; None where
    it is not set. Names that are no numbers are ids of cards, or of parts of one (MIG)."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    known = driver_gpus() or sys.maxsize  # without NVIDIA's driver there is no number to check
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [name for name in names if not name.lstrip("-").isdigit() or 0 <= int(name) < known]


def driver_gpus() -> int:
    """GPUs that NVIDIA's management library counts; 0 without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return 0
    return count.value


def resolve_accelerator(asked: str, environ: Mapping[str, str] = os.environ) -> str:
    """``cpu``, ``gpu`` or ``mps`` for what was asked; raises `UsageError` for other words."""
    if asked not in ACCELERATORS:
        raise UsageError(
            f"trainer.accelerator must be one of {', '.join(ACCELERATORS)}; got {asked!r}."
        )
    if asked == "auto":
        if nvidia_gpus(environ):
            return "gpu"
        return "mps" if (platform.system(), platform.machine()) == ("Darwin", "arm64") else "cpu"
    return "gpu" if asked == "cuda" else asked


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available(accelerator: str, environ: Mapping[str, str] = os.environ) -> int:
    """Devices of one kind on this machine; of a CPU, its cores, which any number may share."""
    if accelerator == "gpu":
        # Without NVIDIA's library there may still be GPUs (ROCm): only then torch is asked.
        return nvidia_gpus(environ) or _torch_gpus()
    return 1 if accelerator == "mps" else cores()


def _torch_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def resolve_devices(
    asked: Any, accelerator: str, environ: Mapping[str, str] = os.environ
) -> int | list[int]:
    """The number of devices, or the list of their ids, that ``trainer.devices`` means.

    ``auto`` and ``-1`` are all GPUs, or one CPU device: on a CPU more devices share the same cores.
    Raises `UsageError` for anything else than a positive number, a list of ids, ``auto`` or ``-1``.
    """
    if isinstance(asked, str) and asked.strip().lstrip("-").isdigit():
        asked = int(asked)
    if isinstance(asked, list):
        return _check_ids(asked, accelerator, environ)
    if asked == "auto" or (asked == -1 and not isinstance(asked, bool)):
        return available(accelerator, environ) if accelerator == "gpu" else 1
    if not isinstance(asked, int) or isinstance(asked, bool) or asked < 1:
        raise UsageError(
            "trainer.devices must be a positive number, a list of device ids, or auto; "
            f"got {asked!r}. {_what_there_is(accelerator, environ)}"
        )
    if accelerator != "cpu" and asked > available(accelerator, environ):
        raise UsageError(
            f"trainer.devices must not exceed the devices there are; got {asked}. "
            f"{_what_there_is(accelerator, environ)}"
        )
    return asked


def _check_ids(ids: list[Any], accelerator: str, environ: Mapping[str, str]) -> int | list[int]:
    whole = all(isinstance(item, int) and not isinstance(item, bool) for item in ids)
    if not ids or not whole or len(set(ids)) < len(ids) or min(ids) < 0:
        raise UsageError(
            f"trainer.devices as a list must hold different device ids from 0 on; got {ids}. "
            f"{_what_there_is(accelerator, environ)}"
        )
    if accelerator == "cpu":
        return len(ids)  # CPU devices are alike: only their number counts
    if max(ids) >= available(accelerator, environ):
        raise UsageError(
            f"trainer.devices names device {max(ids)}, which does not exist. "
            f"{_what_there_is(accelerator, environ)}"
        )
    return ids


def _what_there_is(accelerator: str, environ: Mapping[str, str]) -> str:
    count = available(accelerator, environ)
    if accelerator == "cpu":
        return (
            "Any number of CPU devices works, such as trainer.devices=2: they share the "
            f"{count} CPU cores of this machine."
        )
    if count == 0:
        return "This machine has no GPU that can be used; use trainer.accelerator=cpu."
    return f"This machine has {count} of accelerator={accelerator} (ids 0 to {count - 1})."
