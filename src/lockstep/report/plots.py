"""Curves and bars, as PNG files and as SVG for the page. Needs matplotlib: the extra ``plots``."""

from __future__ import annotations

import io
import re
from math import isfinite
from pathlib import Path

from matplotlib.figure import Figure

from lockstep.report.reading import Job, varied_keys
from lockstep.report.table import SPLIT, Row, elsewhere

WIDTH, HEIGHT = 11.0, 3.6
"""Inches."""
WIDE = 1000
"""The largest over the smallest loss from which a linear axis would show one line alone."""
LABEL = 40
"""Characters of a job in a legend."""


def draw(jobs: list[Job], rows: list[Row], into: Path) -> dict[str, str]:
    """Write the PNG files; returns caption -> SVG."""
    figures = {
        "curves": ("Loss against steps, samples and seconds", curves(jobs)),
        "scaling": ("Samples per second over devices", scaling(rows)),
        "exchange": (
            "Bytes per step: what a root or a link moves, and what was measured",
            exchange(rows),
        ),
    }
    drawn = {}
    for name, (caption, figure) in figures.items():
        if figure is not None:
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # its places are found; each file would search again
            figure.savefig(into / f"report-{name}.png", dpi=110)
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None})
            svg = file.getvalue()
            drawn[caption] = _inline(svg)
    return drawn


def _inline(svg: str) -> str:
    """For a page: without the addresses of namespaces, which HTML knows, and of matplotlib."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")


def curves(jobs: list[Job]) -> Figure | None:
    """A line per job: ``train/loss`` where there is one, else ``val/loss``; on a logarithmic
    axis where one of them is far above the others."""
    losses = ("train/loss", "val/loss")
    found = [(job, next((name for name in losses if job.history.get(name)), "")) for job in jobs]
    lines = [(job, job.history[name]) for job, name in found if name]
    if not lines:
        return None
    every = [value for _, points in lines for _, _, value in points if isfinite(value)]
    wide = bool(every) and min(every) > 0 and max(every) > WIDE * min(every)
    varied = varied_keys(jobs)
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    for axes, unit in zip(
        figure.subplots(1, 3, sharey=True), ("steps", "samples", "seconds"), strict=True
    ):
        for job, points in lines:
            batch = job.result.get("effective_batch_size") or 1
            along = {
                "steps": [step + 1 for step, _, _ in points],
                "samples": [(step + 1) * batch for step, _, _ in points],
                "seconds": [seconds for _, seconds, _ in points],
            }
            values = [value for _, _, value in points]
            axes.plot(along[unit], values, marker=".", alpha=0.8, label=_label(job, varied))
        axes.set_xlabel(unit)
        axes.grid(alpha=0.3)
        if wide:
            axes.set_yscale("log")
    figure.axes[0].set_ylabel(" or ".join(sorted({name for _, name in found if name})))
    if len(lines) <= 12:
        labels = figure.axes[-1].get_legend_handles_labels()
        legend = figure.legend(*labels, loc="outside right center", fontsize="small")
        for text in legend.get_texts():
            text.set_parse_math(False)  # a value may have dollar signs
    return figure


def _label(job: Job, varied: list[str]) -> str:
    """The number, and the values that vary, by the last parts of their keys."""
    values = [f"{key.rpartition('.')[2]}={job.overrides.get(key)}" for key in varied]
    return " ".join([f"#{job.name}", *values])[:LABEL]


def scaling(rows: list[Row]) -> Figure | None:
    """Where strategy or devices vary: a line per strategy, and per other values that vary; dotted,
    what its first point would be on more devices if nothing were lost."""
    by_strategy: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        speed, job = row.values.get("samples/s"), row.jobs[0]
        if speed and SPLIT & job.overrides.keys():
            others = [f"{key}={value}" for key, value in elsewhere(job) if key in row.values]
            name = " ".join([job.result["strategy"], *others])
            by_strategy.setdefault(name, []).append((job.devices, speed))
    if not any(len({devices for devices, _ in points}) > 1 for points in by_strategy.values()):
        return None
    figure = Figure(figsize=(WIDTH / 2, HEIGHT), layout="constrained")
    axes = figure.subplots()
    for strategy, points in sorted(by_strategy.items()):
        points.sort()
        (line,) = axes.plot(*zip(*points, strict=True), marker="o", label=strategy)
        (devices, speed), last = points[0], points[-1][0]
        axes.plot([devices, last], [speed, speed * last / devices], ":", color=line.get_color())
    most = max(devices for points in by_strategy.values() for devices, _ in points)
    axes.plot([], [], "k:", label="ideal")
    axes.set_xlabel("devices")
    axes.set_ylabel("samples per second")
    axes.set_xticks(range(1, most + 1))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    for text in axes.legend().get_texts():
        text.set_parse_math(False)  # a value may have dollar signs
    return figure


def exchange(rows: list[Row]) -> Figure | None:
    """Of N devices and P bytes of gradients, a parameter server's root moves 2 (N - 1) P per step,
    each link of a ring 2 (N - 1) / N P."""
    jobs = [row.jobs[0] for row in rows]
    size = next((bytes_ for job in jobs if (bytes_ := job.result.get("gradient_bytes"))), None)
    counts = {job.devices for job in jobs if job.finished}
    if size is None or len(counts) < 2:
        return None
    measured = [
        (row.jobs[0].devices, row.values["exchanged bytes"])
        for row in rows
        if row.values.get("exchanged bytes")
    ]
    numbers = range(1, max(8, *counts) + 1)
    figure = Figure(figsize=(WIDTH / 2, HEIGHT), layout="constrained")
    axes = figure.subplots()
    axes.plot(numbers, [2 * (n - 1) * size for n in numbers], label="parameter server, its root")
    axes.plot(numbers, [2 * (n - 1) / n * size for n in numbers], label="ring, each link")
    if measured:
        axes.plot(*zip(*measured, strict=True), "ko", label="these jobs")
    axes.set_xlabel("devices")
    axes.set_ylabel("bytes per step")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
