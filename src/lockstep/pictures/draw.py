"""The pictures of one run, as matplotlib figures. Needs matplotlib: the extra ``plots``."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

WRITTEN = 20
"""Classes of a confusion matrix up to which its numbers are written into it."""
GROUPS = 12
"""Different true values up to which each gets a box of what was predicted for it."""

PARTS = (("train", ".-", "tab:blue"), ("val", ".-", "tab:orange"), ("test", "*", "tab:green"))

History = Mapping[str, Sequence[tuple[int, float]]]


def learning_curves(history: History) -> Figure:
    """A plot per metric, over optimizer steps: training, validation, and the test as a star.

    ``history`` maps ``train/loss`` and the like to (step, value) pairs.
    """
    metrics = sorted({name.partition("/")[2] for name in history if "/" in name})
    metrics.sort(key=lambda name: name != "loss")
    figure = Figure(figsize=(4.5 * len(metrics), 3.6), layout="constrained")
    for axes, metric in zip(
        figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True
    ):
        for part, style, color in PARTS:
            points = history.get(f"{part}/{metric}", ())
            if points:
                # Training and validation are logged by the last step's number, from 0.
                done = 0 if part == "test" else 1
                steps, values = zip(*((step + done, value) for step, value in points), strict=True)
                axes.plot(steps, values, style, color=color, label=part)
        _label(axes, "optimizer steps", metric)
        axes.legend()
    return figure


def confusion(counts: Sequence[Sequence[int]], classes: Sequence[str], part: str) -> Figure:
    """Rows true, columns predicted; shades are shares of a row, numbers are samples."""
    table = numpy.array(counts)
    size = max(4.0, min(12.0, 0.5 * len(table) + 2))
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    axes = figure.subplots()
    shares = table / numpy.maximum(table.sum(1, keepdims=True), 1)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the true class")
    right = numpy.trace(table)
    axes.set_title(f"{part}: {right:,} of {table.sum():,} right")
    _label(axes, "predicted", "true", grid=False)
    if len(table) <= WRITTEN:
        axes.set_xticks(
            range(len(table)), classes, rotation=90 if max(map(len, classes)) > 3 else 0
        )
        axes.set_yticks(range(len(table)), classes)
        for (row, column), count in numpy.ndenumerate(table):
            if count:
                ink = "white" if shares[row, column] > 0.5 else "black"
                axes.text(column, row, f"{count}", ha="center", va="center", color=ink, fontsize=8)
    return figure


def numbers(predicted: Tensor, target: Tensor) -> Figure:
    """Predicted against true: a dot for each sample, or a box for each true value of a few."""
    figure = Figure(figsize=(5, 4.6), layout="constrained")
    axes = figure.subplots()
    values = torch.unique(target)
    if len(values) <= GROUPS:
        groups = [predicted[target == value].numpy() for value in values]
        axes.boxplot(
            groups,
            positions=values.tolist(),
            widths=0.5 * float(values.diff().min()) if len(values) > 1 else 0.5,
        )
        axes.set_xticks(values.tolist(), [f"{value:g}" for value in values.tolist()])
    else:
        axes.scatter(target, predicted, s=8, alpha=0.5)
    ends = [float(target.min()), float(target.max())]
    axes.plot(ends, ends, "--", color="gray", linewidth=1, label="as it should be")
    axes.set_title(f"the first {len(target):,} test samples")
    _label(axes, "true", "predicted")
    axes.legend()
    return figure


def images(columns: Mapping[str, Tensor], classes: Sequence[str]) -> Figure:
    """The first images of the test, with what was predicted and, where that is wrong, the truth."""
    shown = columns["images"]
    rows = -(-len(shown) // 8)
    figure = Figure(figsize=(11, 1.75 * rows), layout="constrained")
    places = figure.subplots(rows, 8, squeeze=False).ravel()
    for axes in places:
        axes.set_axis_off()
    for i, (axes, image) in enumerate(zip(places, shown, strict=False)):
        low, high = float(image.min()), float(image.max())
        pixels = ((image - low) / ((high - low) or 1)).permute(1, 2, 0).numpy()
        axes.imshow(pixels.squeeze(-1) if pixels.shape[2] == 1 else pixels, cmap="gray")
        predicted, true = int(columns["predicted"][i]), int(columns["target"][i])
        said = f"{classes[predicted]} ({float(columns['sure'][i]):.0%})"
        wrong = predicted != true
        axes.set_title(
            f"{said}\nis {classes[true]}" if wrong else said,
            fontsize=8,
            color="red" if wrong else "black",
        )
    return figure


def texts(columns: Mapping[str, Tensor]) -> Figure:
    """Under each text to continue, byte by byte, the most likely next one; wrong ones in red."""
    tokens, predicted, target = (columns[name] for name in ("tokens", "predicted", "target"))
    count, width = tokens.shape
    figure = Figure(figsize=(0.115 * width + 0.6, 0.55 * count + 0.5))
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.9))
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(3 * count, 0)
    axes.set_title("above, what comes next in the text; below, what was predicted", fontsize=9)
    for row in range(count):
        for place in range(width):
            true, guess = int(target[row, place]), int(predicted[row, place])
            if true < 0:
                continue
            options: dict[str, Any] = {"family": "monospace", "fontsize": 8, "parse_math": False}
            axes.text(place, 3 * row + 0.5, _character(true), **options)
            axes.text(
                place,
                3 * row + 1.5,
                _character(guess),
                color="green" if guess == true else "red",
                **options,
            )
    return figure


def ranks(columns: Mapping[str, Tensor], classes: Sequence[str]) -> Figure:
    """For each sample where the truth stands in the order of the scores: 1 is right."""
    rank = columns["rank"]
    figure = Figure(figsize=(7, 0.28 * len(rank) + 1), layout="constrained")
    axes = figure.subplots()
    colors = ["tab:green" if place == 1 else "tab:red" for place in rank.tolist()]
    axes.barh(range(len(rank)), rank.tolist(), color=colors)
    names = [
        f"{_short(classes, true)}, predicted {_short(classes, guess)}"
        for true, guess in zip(
            columns["target"].tolist(), columns["predicted"].tolist(), strict=True
        )
    ]
    axes.set_yticks(range(len(rank)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_title(f"the first {len(rank)} test samples")
    _label(axes, "rank of the true one (1: right)", "true")
    return figure


def _short(classes: Sequence[str], index: int) -> str:
    return textwrap.shorten(classes[index], 24) if index < len(classes) else str(index)


def _character(byte: int) -> str:
    return chr(byte) if 32 < byte < 127 else "\u00b7" if byte in (10, 32) else "\u2020"


def _label(axes: Axes, x: str, y: str, grid: bool = True) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if grid:
        axes.grid(alpha=0.3)
