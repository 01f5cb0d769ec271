"""The table as a picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.rows import Row


def draw(rows: list[Row], path: Path) -> Path:
    """A bar per row that has a target: how much better than its target, on a scale of ratios."""
    shown = [row for row in rows if row.target is not None][::-1]
    figure = Figure(figsize=(9, 0.9 + 0.3 * len(shown)), layout="constrained")
    axes = figure.subplots()
    lengths = [advantage(row) for row in shown]
    colors = ["tab:blue" if row.met else "tab:red" for row in shown]
    axes.barh(range(len(shown)), [length - 1 for length in lengths], left=1, color=colors)
    axes.set_yticks(range(len(shown)), [label(row) for row in shown], fontsize="small")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks(ticks := [0.5, 0.75, 1, 1.5, 2, 3], list(map(str, ticks)))
    axes.set_xticks([], minor=True)
    axes.set_xlim(min(0.7, *lengths) / 1.05, max(1.5, *lengths) * 1.05)
    axes.set_xlabel("how many times better than its target (red: missed)")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)
    return path


def advantage(row: Row) -> float:
    assert row.target is not None
    return row.value / row.target if row.at_least else row.target / row.value


def label(row: Row) -> str:
    sign = ">=" if row.at_least else "<="
    what = row.what if len(row.what) <= 60 else f"{row.what[:57]}..."
    return f"{what}  {row.value:.2f} {sign} {row.target:g}".replace("$", "")
