"""Hydra's sweep overrides as ranges to search in."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from lockstep.errors import UsageError

Space = dict[str, BaseDistribution]


def parse(
    overrides: Iterable[str], config_loader: ConfigLoader | None = None
) -> tuple[list[str], Space]:
    """The overrides that all trials share, and what is searched, by key.

    ``a,b`` and ``choice(a,b)`` are categories; ``range(1,9,2)`` is 1, 3, 5, 7; ``interval(0.1,1)``
    any number between, ``int(interval(1,9))`` any whole one, both ends included;
    ``tag(log,interval(1e-4,1))`` on a logarithmic scale. The grammar is Hydra's.

    Raises `UsageError` for a range that holds nothing.
    """
    fixed: dict[str, str] = {}
    space: Space = {}
    for override in OverridesParser.create(config_loader).parse_overrides(list(overrides)):
        key = override.get_key_element()
        fixed.pop(key, None)  # of two for one key the later one holds
        space.pop(key, None)
        if override.is_sweep_override():
            space[key] = _distribution(override, key)
        else:
            fixed[key] = override.input_line or ""
    return list(fixed.values()), space


def _distribution(override: Override, key: str) -> BaseDistribution:
    sweep = override.value()
    try:
        if isinstance(sweep, IntervalSweep):
            return _interval(sweep)
        if isinstance(sweep, RangeSweep):
            return _range(sweep)
        # As text: whatever Hydra can parse is a category, lists and mappings included.
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    except ValueError as error:
        raise UsageError(
            f"{key} must be searched in a range with something in it; got {override.input_line}: "
            f"{error}"
        ) from None


def _interval(sweep: IntervalSweep) -> BaseDistribution:
    low, high = sweep.start, sweep.end
    assert low is not None
    assert high is not None
    if unknown := sweep.tags - {"log"}:
        raise ValueError(f"the only tag is log; got {', '.join(sorted(unknown))}.")
    log = "log" in sweep.tags
    if not low < high:
        raise ValueError(f"the low end must be below the high one; got {low} and {high}.")
    if log and low <= 0:
        raise ValueError(f"a logarithmic scale begins above 0; got {low}.")
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log)
    return FloatDistribution(low, high, log=log)


def _range(sweep: RangeSweep) -> BaseDistribution:
    low, stop, step = sweep.start, sweep.stop, sweep.step
    assert low is not None
    assert stop is not None
    if sweep.tags:
        raise ValueError("a range has no tags; use interval(...), or choice(...) for few values.")
    count = math.ceil((stop - low) / step) if step > 0 else 0
    if count < 1:
        raise ValueError(f"it must go up from {low} to below {stop}; the step is {step}.")
    high = low + (count - 1) * step
    if all(isinstance(number, int) for number in (low, high, step)):
        return IntDistribution(int(low), int(high), step=int(step))
    return FloatDistribution(low, high, step=step)


def lowest(space: Space) -> list[str]:
    """Overrides with one value of each range, to try whether jobs can be composed at all."""
    return [
        f"{key}={range_.choices[0] if isinstance(range_, CategoricalDistribution) else range_.low}"  # type: ignore[attr-defined]
        for key, range_ in space.items()
    ]
