"""The rows that people compare, as numbers and as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

from lockstep.report.reading import Job, varied_keys

SPLIT = {"trainer.strategy", "trainer.devices", "strategy", "trainer.num_nodes"}
"""Keys that say where a run is computed: a difference in them must not show in the metrics."""
TOLERANCE = 1e-3
"""Relative; float32 sums in another order are 1e-6 apart after a step, more after thousands."""
MEGABYTE = 2**20

Values = dict[str, Any]


@dataclass
class Row:
    jobs: list[Job]
    """One, or the repeats over ``seed``."""
    values: Values = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    """Of repeats: the standard deviation of a value, by its name."""


def rows_of(jobs: list[Job]) -> list[Row]:
    """A row per job, or per group of jobs that differ in their seed alone."""
    varied = varied_keys(jobs)
    groups: dict[tuple[Any, ...], list[Job]] = {}
    for job in jobs:
        place = tuple(job.overrides.get(key) for key in varied if key != "seed")
        alone = () if "seed" in varied and job.finished else (job.name,)
        groups.setdefault((*place, *alone), []).append(job)
    rows = [_row(group, varied) for group in groups.values()]
    for row in rows:
        _compare(row, reference_of(row, rows))
    return rows


def _row(jobs: list[Job], varied: list[str]) -> Row:
    name = jobs[0].name if len(jobs) == 1 else f"{jobs[0].name}.. ({len(jobs)} seeds)"
    keys = [key for key in varied if key != "seed" or len(jobs) == 1]
    row = Row(jobs, {"job": name, "status": jobs[0].result.get("status", "unknown")})
    row.values |= {key: jobs[0].overrides.get(key) for key in keys}
    if not jobs[0].finished:
        return row
    each = [_measured(job) for job in jobs]
    for key in each[0]:
        numbers = [one[key] for one in each if isinstance(one.get(key), int | float)]
        row.values[key] = mean(numbers) if numbers else None
        if len(numbers) > 1:
            row.spread[key] = stdev(numbers)
    return row


def _measured(job: Job) -> Values:
    result = job.result
    memory = [value / MEGABYTE for value in result.get("peak_memory_bytes", [])]
    numbers = {k: v for k, v in result["metrics"].items() if isinstance(v, int | float)}
    low, high = result.get("samples_per_second_quartiles") or (None, None)
    return {
        "samples/s": result.get("samples_per_second"),
        "quarter below": low,
        "quarter above": high,
        "first step s": result.get("time_to_first_step_s"),
        "wall s": result.get("wall_time_s"),
        "MB a rank": max(memory, default=None),
        "MB in all": sum(memory) if memory else None,
        "exchange share": result.get("exchange_share"),
        "exchanged bytes": result.get("exchanged_bytes_per_step"),
        **numbers,
    }


def reference_of(row: Row, rows: list[Row]) -> Row | None:
    """The row on one device that differs from this one in where it was computed alone."""
    if not row.jobs[0].finished:
        return None
    same = [
        other
        for other in rows
        if other.jobs[0].finished
        and other.jobs[0].devices == 1
        and _elsewhere(other) == _elsewhere(row)
    ]
    own = row.jobs[0].overrides.get("trainer.strategy")
    plain = [other for other in same if other.jobs[0].overrides.get("trainer.strategy") == own]
    candidates = plain or same
    return candidates[0] if candidates else None


def _elsewhere(row: Row) -> list[tuple[str, str]]:
    ignored = SPLIT | ({"seed"} if len(row.jobs) > 1 else set())
    return sorted(item for item in row.jobs[0].overrides.items() if item[0] not in ignored)


def _compare(row: Row, reference: Row | None) -> None:
    if reference is None or reference is row:
        return
    own, other = row.values.get("samples/s"), reference.values.get("samples/s")
    if own and other:
        row.values["speed-up"] = own / other
        row.values["efficiency"] = own / other / row.jobs[0].devices
    metrics = row.jobs[0].result["metrics"]
    names = [name for name in metrics if isinstance(row.values.get(name), int | float)]
    row.values["agrees"] = all(
        abs(row.values[name] - reference.values.get(name, float("nan")))
        <= TOLERANCE * max(abs(reference.values.get(name, 0.0)), 1e-12)
        for name in names
    )


def columns_of(rows: list[Row]) -> list[str]:
    """Those that have a value in some row, the ones for people first."""
    first = ["job", "status"]
    found = dict.fromkeys(
        key for row in rows for key, value in row.values.items() if value is not None
    )
    derived = [key for key in ("speed-up", "efficiency", "agrees") if key in found]
    rest = [key for key in found if key not in (*first, *derived)]
    place = next((i + 1 for i, key in enumerate(rest) if key == "samples/s"), len(rest))
    return [*first, *rest[:place], *derived, *rest[place:]]


def text_of(row: Row, column: str) -> str:
    value = row.values.get(column)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if not isinstance(value, int | float):
        return str(value)
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{text} ± {row.spread[column]:.2g}" if column in row.spread else text


def errors_of(jobs: list[Job]) -> list[str]:
    """A line for each job that has not finished."""
    return [
        f"  #{job.name}  {job.result.get('status', 'unknown')}  "
        f"{' '.join(f'{key}={value}' for key, value in job.overrides.items())}  "
        f"{(job.result.get('error') or '').partition(chr(10))[0]}".rstrip()
        for job in jobs
        if not job.finished
    ]
