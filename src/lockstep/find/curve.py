"""Loss over rate: the rates, the curve as a person reads it, and its steepest place."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path

import numpy as np

SMOOTHING = 0.9
"""Share of the mean so far in the next one: it looks back about ten of a hundred steps."""
SKIPPED = 10
"""First losses left out: their mean is of too few."""


def rates(lowest: float, highest: float, steps: int) -> list[float]:
    """Each the same multiple of the one before, both ends included."""
    return [lowest * (highest / lowest) ** (step / (steps - 1)) for step in range(steps)]


def smoothed(losses: list[float]) -> list[float]:
    """The exponential mean, without the pull of its start to zero (Adam's correction)."""
    mean, curve = 0.0, []
    for step, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        curve.append(mean / (1 - SMOOTHING**step))
    return curve


def steepest(losses: list[float]) -> int | None:
    """Where the smoothed loss falls most per factor in the rate; None: it falls nowhere."""
    curve = smoothed(losses)[SKIPPED:-1]
    if len(curve) < 2:
        return None
    slopes = np.gradient(curve)
    place = int(np.argmin(slopes))
    return place + SKIPPED if slopes[place] < 0 else None


def write_table(path: Path, tried: list[float], losses: list[float]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("lr", "loss", "smoothed"))
        writer.writerows(zip(tried, losses, smoothed(losses), strict=True))


def draw(path: Path, tried: list[float], losses: list[float], place: int) -> None:
    """Where matplotlib is installed: the curve, with a dot at the suggestion."""
    if find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes, curve = figure.subplots(), smoothed(losses)
    axes.plot(tried, losses, alpha=0.3, label="loss")
    axes.plot(tried, curve, label="smoothed")
    axes.plot(tried[place], curve[place], "o", label=f"lr {tried[place]:.3g}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="training loss")
    axes.legend()
    figure.savefig(path)
