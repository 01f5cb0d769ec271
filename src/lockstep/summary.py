"""The lines that a person reads at a run's start and at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.placement import Placement
from lockstep.record import Run
from lockstep.results import Result


def opening_line(run: Run) -> str:
    """What, how many, where: ``ddp: 2 processes x 16 samples (global batch 32), cpu, ...``."""
    config, placement = run.config, run.placement
    sizes = run.sizes
    if run.task is not None:
        where = f"{placement.strategy}, {_spread(placement)}, {placement.accelerator}"
        return f"{run.task.title}: {where}, writing {_short(run.directory)}"
    batch = f"global batch {sizes.global_}"
    if config.trainer.accumulate_grad_batches > 1:
        steps = config.trainer.accumulate_grad_batches
        batch += f", {steps} accumulated: {sizes.effective} a step"
    rate = run.optimizer.get("lr")
    return (
        f"{placement.strategy}: {_spread(placement)} x {sizes.per_process} samples ({batch}), "
        f"{placement.accelerator}, lr {rate}, seed {config.seed}, writing {_short(run.directory)}"
    )


def _spread(placement: Placement) -> str:
    processes = _count(placement.world_size, "process", "processes")
    if placement.world_size == 1 and placement.device_count > 1:
        return f"{processes} on {placement.device_count} devices"
    return processes


def _short(path: Path) -> str:
    """The path from here, when it is below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def closing_block(result: Result) -> str:
    """The numbers of a finished run, a line each."""
    computed = _training(result) if "steps" in result else [("time", _time(result))]
    rows = [
        ("strategy", f"{result['strategy']}, {_devices(result)}"),
        *computed,
        *((name, _value(name, value, result)) for name, value in result["metrics"].items()),
        *((key, str(result[key])) for key in ("rows", "checkpoint", "output") if key in result),
        ("directory", _short(Path(result["directory"]))),
    ]
    width = max(len(name) for name, _ in rows)
    return f"{result['status']}\n" + "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def _training(result: Result) -> list[tuple[str, str]]:
    speed, first = result["samples_per_second"], result["time_to_first_step_s"]
    return [
        (
            "batch",
            f"{result['global_batch_size']} global, {result['per_process_batch_size']} per process",
        ),
        ("trained", f"{result['epochs']} epochs, {result['steps']} optimizer steps"),
        ("time", _time(result) + (f", {first:.1f} s to the first step" if first else "")),
        ("speed", f"{speed:,.0f} samples per second" if speed else "too few steps to tell"),
        *((("best", _best(result["best"])),) if result.get("best") else ()),
    ]


def _best(best: dict[str, Any]) -> str:
    return f"{best['metric']} {best['value']:.6g} in {best['checkpoint']}"


def _time(result: Result) -> str:
    return f"{result['wall_time_s']:.1f} s in all"


def _devices(result: Result) -> str:
    processes = _count(result["world_size"], "process", "processes")
    devices = result["devices"]
    count = (len(devices) if isinstance(devices, list) else devices) * result["num_nodes"]
    return f"{processes}, {_count(count, 'device', 'devices')} ({result['accelerator']})"


def _value(name: str, value: object, result: Result) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if name == "test/loss" and result.get("floor") is not None:
        return f"{text}  (no model can get below {result['floor']:.6g})"
    return text
