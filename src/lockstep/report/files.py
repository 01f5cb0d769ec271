"""``report.csv``, ``report.md``, the plots and the page, beside the jobs."""

from __future__ import annotations

import csv
import io
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.report.reading import Job, common_overrides, read_jobs
from lockstep.report.table import (
    EXPLAINED,
    QUARTILES,
    Row,
    best_of,
    columns_of,
    errors_of,
    rows_of,
    text_of,
)
from lockstep.results import write_atomically


def write_report(directories: Sequence[Path], into: Path) -> str:
    """Write all files of a report into a directory; returns its table, and where the page is."""
    jobs = read_jobs(directories)
    rows = rows_of(jobs)
    write_atomically(into / "report.csv", as_csv(rows))
    write_atomically(into / "report.md", as_markdown(jobs, rows))
    try:
        from lockstep.report.plots import draw
    except ImportError as missing:
        note = f"no plots: {missing.name} is not installed. pip install 'lockstep[plots]'"
        figures: dict[str, str] = {}
    else:
        note, figures = "", draw(jobs, rows, into)
    from lockstep.report.page import page

    write_atomically(into / "report.html", page(jobs, rows, figures))
    lines = [_shared(jobs), as_text(rows), best_of(rows), note, f"report: {into / 'report.html'}"]
    return "\n".join(line for line in lines if line)


def as_text(rows: list[Row], width: int | None = None) -> str:
    """``width`` in characters; None: that of the terminal, and no limit for a file."""
    width = width or shutil.get_terminal_size((sys.maxsize, 0)).columns
    columns = [name for name in columns_of(rows) if name not in QUARTILES]
    table = [[name, *(text_of(row, name) for row in rows)] for name in columns]
    widths = [2 + max(map(len, column)) for column in table]
    shown = next((n for n in range(len(table), 1, -1) if sum(widths[:n]) < width), 1)
    lines = [
        "".join(
            f"  {column[i].ljust(w - 2)}" for column, w in zip(table[:shown], widths, strict=False)
        )
        for i in range(len(rows) + 1)
    ]
    if shown < len(columns):
        lines.append(f"  the terminal is too narrow for: {', '.join(columns[shown:])}")
    return "\n".join(line.rstrip() for line in lines)


def as_csv(rows: list[Row]) -> str:
    """Full numbers; a column ``<name> sd`` for what repeats over seeds spread."""
    columns = columns_of(rows)
    spread = [name for name in columns if any(name in row.spread for row in rows)]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*columns, *(f"{name} sd" for name in spread)])
    for row in rows:
        own = [row.values.get(name) for name in columns]
        writer.writerow([*own, *(row.spread.get(name) for name in spread)])
    return file.getvalue()


def as_markdown(jobs: list[Job], rows: list[Row]) -> str:
    columns = [name for name in columns_of(rows) if name not in QUARTILES]
    lines = ["# Report", "", f"{len(jobs)} jobs. {_shared(jobs)}", ""]
    lines += [_cells(columns), "|" + "---|" * len(columns)]
    lines += [_cells([text_of(row, name) for name in columns]) for row in rows]
    best = best_of(rows)
    lines += ["", *([_plain(best), ""] if best else []), EXPLAINED]
    failed = errors_of(jobs)
    if failed:
        lines += ["", "Not finished:", "", *(f"- {_plain(line.strip())}" for line in failed)]
    return "\n".join(lines) + "\n"


def _shared(jobs: list[Job]) -> str:
    shared = common_overrides(jobs)
    return f"All have `{' '.join(shared)}`." if shared else ""


def _cells(cells: list[str]) -> str:
    return "| " + " | ".join(map(_plain, cells)) + " |"


def _plain(text: str) -> str:
    """No markup and no new cell or line, whatever people wrote."""
    for character, instead in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("\n", " ")):
        text = text.replace(character, instead)
    return text
