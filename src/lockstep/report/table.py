"""The rows that people compare, as numbers and as text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

from lockstep.plan import GOING_ON
from lockstep.report.reading import Job, varied_keys

SPLIT = {"trainer.strategy", "trainer.devices", "trainer.num_nodes", "strategy", "strategy.name"}
"""Keys that say where a run is computed: a difference in them must not show in the metrics."""
OTHER_TASK, OTHER_DATA = ("data", "experiment", "model.loss"), ("data.datasets", "model.loss.")
"""Keys in which runs may differ so that their metrics are of different things."""
TOLERANCE = 1e-4
"""Relative; float32 sums in another order are 1e-6 apart after a step, more after thousands."""
EXPLAINED = (
    "Speed-up, and efficiency (speed-up over devices), are against one device, with the same "
    "strategy where that was run; a row agrees when all its metrics are those of the first job on "
    f"one device that computes the same, to {TOLERANCE:g} relative. A cell is empty where there "
    "is nothing to compare with, or nothing was measured. train/ and val/ are of the last epoch, "
    "test/ of the best checkpoint where one was chosen; memory is the most that a process had, "
    "libraries that it loaded itself with it (a rank, and a sweep's job, share them: 300 MB less)."
)
QUARTILES = ("quarter below", "quarter above")
"""Columns of their own in ``report.csv``; for people they stand behind the median."""
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
    """A row per job, or per group of finished jobs of one sweep that differ in their seed alone."""
    varied = varied_keys(jobs)
    groups: dict[tuple[Any, ...], list[Job]] = {}
    for job in jobs:
        place = tuple(job.overrides.get(key) for key in varied if key != "seed")
        alone = () if "seed" in varied and job.finished else (job.name,)
        groups.setdefault((job.directory.parent, *place, *alone), []).append(job)
    return [_row(group, varied, jobs) for group in groups.values()]


def _row(repeats: list[Job], varied: list[str], jobs: list[Job]) -> Row:
    first, count = repeats[0], len(repeats)
    name = first.name if count == 1 else f"{first.name}.. ({count} seeds)"
    keys = [key for key in varied if key != "seed" or count == 1]
    row = Row(repeats, {"job": name, "status": first.result.get("status", "unknown")})
    row.values |= {key: first.setting(key) for key in keys}
    if not first.measured:
        return row
    each = [_measured(job) | _compared(job, jobs) for job in repeats]
    for key in dict.fromkeys(key for one in each for key in one if key != "agrees"):
        numbers = [one[key] for one in each if isinstance(one.get(key), int | float)]
        row.values[key] = mean(numbers) if numbers else None
        if len(numbers) > 1:
            row.spread[key] = stdev(numbers)
    agreed = [one["agrees"] for one in each if "agrees" in one]
    row.values["agrees"] = all(agreed) if agreed else None
    return row


def _metrics(job: Job) -> dict[str, float]:
    return {k: v for k, v in job.result["metrics"].items() if isinstance(v, int | float)}


def _measured(job: Job) -> Values:
    result = job.result
    memory = [value / MEGABYTE for value in result.get("peak_memory_bytes", [])]
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
        **_metrics(job),
    }


def references_of(job: Job, jobs: list[Job]) -> tuple[Job | None, Job | None]:
    """What a job's speed, and what its metrics are compared with: jobs on one device that differ
    from it, if at all, in where they were computed; of its own sweep where there is one.

    Speed: of the same strategy where there is one. Metrics: of the same batch, one for all
    strategies, for a wrong strategy may well agree with itself.
    """
    same = [
        other
        for other in jobs
        if other.finished and other.devices == 1 and elsewhere(other) == elsewhere(job)
    ]
    same.sort(key=lambda other: other.directory.parent != job.directory.parent)
    size = job.result.get("effective_batch_size")
    equal = [other for other in same if other.result.get("effective_batch_size") == size]
    own = [other for other in same if other.result.get("strategy") == job.result.get("strategy")]
    return next(iter(own or same), None), next(iter(equal), None)


def elsewhere(job: Job) -> list[tuple[str, str]]:
    """The overrides that say what is computed."""
    ignored = SPLIT.union(GOING_ON)
    return sorted(item for item in job.overrides.items() if item[0] not in ignored)


def _compared(job: Job, jobs: list[Job]) -> Values:
    """Seed by seed: a mean over other seeds is another number."""
    compared: Values = {}
    if not job.finished:
        return compared
    fast, same = references_of(job, jobs)
    own = job.result.get("samples_per_second")
    other = fast.result.get("samples_per_second") if fast is not None else None
    if fast is not job and own and other:
        compared |= {"speed-up": own / other, "efficiency": own / other / job.devices}
    if same is not None and same is not job:
        expected = _metrics(same)
        compared["agrees"] = all(
            abs(value - expected.get(name, float("nan")))
            <= TOLERANCE * max(abs(expected.get(name, 0.0)), 1e-12)
            for name, value in _metrics(job).items()
        )
    return compared


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
    if column in row.spread:
        return f"{text} +- {row.spread[column]:.2g}"
    low, high = (row.values.get(name) for name in QUARTILES)
    return f"{text} ({low:,.0f}-{high:,.0f})" if column == "samples/s" and low else text


def best_of(rows: list[Row]) -> str:
    """The row whose checkpoint is best by the metric that all were chosen by; of repeats the mean.

    Empty where the rows are the same in it, were not all chosen by one, or differ in their data or
    loss; after a search, whose objective decides, as well.
    """
    finished = [row for row in rows if row.jobs[0].finished]
    jobs = [job for row in finished for job in row.jobs]
    chosen = [job.result.get("best") for job in jobs]
    by = {(best["metric"], best["mode"]) if best else None for best in chosen}
    varied = varied_keys(jobs)
    other = any(key in OTHER_TASK or key.startswith(OTHER_DATA) for key in varied)
    if len(by) != 1 or None in by or other or any(job.searched for job in jobs):
        return ""
    ((metric, mode),) = filter(None, by)
    values = [mean(job.result["best"]["value"] for job in row.jobs) for row in finished]
    if math.isclose(min(values), max(values), rel_tol=TOLERANCE):
        return ""
    value = min(values) if mode == "min" else max(values)
    row = finished[values.index(value)]
    settings = [f"{key}={row.values[key]}" for key in varied if row.values.get(key) is not None]
    words = " ".join([f"#{row.values['job']}", *settings])
    return f"best {metric}: {value:.6g}, at a checkpoint of {words}"


def errors_of(jobs: list[Job]) -> list[str]:
    """A line for each job that has not finished."""
    return [
        f"  #{job.name}  {job.result.get('status', 'unknown')}  "
        f"{' '.join(f'{key}={value}' for key, value in job.overrides.items())}  "
        f"{(job.result.get('error') or '').partition(chr(10))[0]}".rstrip()
        for job in jobs
        if not job.measured
    ]
