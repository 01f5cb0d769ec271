"""Which jobs a sweep was meant to have, by the ``multirun.yaml`` that Hydra leaves in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import yaml

GOING_ON = ("resume", "sweep.resume")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""In C where there is one: a sweep's plan holds its whole config."""


def not_started(plan: Path, found: Iterable[list[str]]) -> list[tuple[int, list[str]]]:
    """Number and overrides of the jobs that a grid's ``multirun.yaml`` has beyond those found.

    A sweeper that searches decides as it goes: it has none.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if not plan.exists():
        return []
    hydra = yaml.load(plan.read_text(), Loader=LOADER)["hydra"]
    if not hydra["sweeper"]["_target_"].endswith(".BasicSweeper"):
        return []
    parsed = OverridesParser.create().parse_overrides(hydra["overrides"]["task"])
    (planned,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    there = Counter(tuple(_told(overrides)) for overrides in found)
    missing = []
    for number, overrides in enumerate(planned):
        job = tuple(_told(overrides))
        if there[job]:
            there[job] -= 1
        else:
            missing.append((number, list(job)))
    return missing


def _told(overrides: list[str]) -> list[str]:
    """Without what makes a sweep go on: its jobs are the same."""
    return [item for item in overrides if split_override(item)[0] not in GOING_ON]


def split_override(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+"), value
