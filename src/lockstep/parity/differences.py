"""How far one run is from another, and why that may be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lockstep.results import read_result

Tensors = dict[str, Tensor]

ZERO = torch.zeros(1, dtype=torch.float64)
SMALL = 0.01
"""The least that a metric's difference is relative to: R2 near 0 still has the last bits of a 1."""
PER_SPLIT = {
    "batchnorm": "BatchNorm: statistics of each replica or rank ({})",
    "dropout": "dropout: other draws on each replica or rank ({})",
}
PER_RANK = {
    "sum": "the loss is a sum, DDP averages over ranks: use a mean ({})",
    "draws": "augmentation: other draws on each rank ({})",
}
ANYWHERE = {"loader": "a loader of its own gives ranks other batches: return Splits ({})"}
IRREPRODUCIBLE = "two runs on one device differ: a draw that does not follow from the seed"
RANK_METRIC = "{} alone: a mean of the ranks' values? Log a torchmetrics object"
ROUNDING = "maybe rounding: without trainer.precision this computes in float64 ({})"
UNKNOWN = "not known: does a step use more than its batch and the weights?"


@dataclass(frozen=True)
class Record:
    """What one run did: the loss of each step ``(steps,)``, weights, metrics and traits."""

    losses: Tensor
    weights: Tensors
    metrics: Tensors
    traits: dict[str, str]
    world_size: int


@dataclass(frozen=True)
class Difference:
    """The largest differences, each relative to the largest value of its kind."""

    loss: float
    weights: float
    metrics: float
    metric: str
    """The name of the metric that differs most."""

    def within(self, tolerance: float) -> bool:
        return max(self.loss, self.weights, self.metrics) <= tolerance


def read_record(directory: Path) -> Record:
    """The record of a finished run that had `lockstep.parity.recording.Recording`."""
    recorded = torch.load(directory / "recording.pt", map_location="cpu", weights_only=True)
    result = read_result(directory / "result.json")
    metrics = {
        name: torch.tensor(value, dtype=torch.float64) for name, value in result["metrics"].items()
    }
    return Record(**recorded, metrics=metrics, world_size=result["world_size"])


def difference(reference: Record, other: Record) -> Difference:
    metrics = {
        name: relative(_only(name, reference.metrics), _only(name, other.metrics), SMALL)
        for name in sorted(reference.metrics.keys() | other.metrics.keys())
    }
    worst = max(metrics, key=lambda name: metrics[name], default="")
    return Difference(
        loss=relative({"loss": reference.losses}, {"loss": other.losses}),
        weights=relative(reference.weights, other.weights),
        metrics=metrics.get(worst, 0.0),
        metric=worst,
    )


def _only(name: str, values: Tensors) -> Tensors:
    return {name: values[name]} if name in values else {}


def relative(reference: Tensors, other: Tensors, smallest: float = 0.0) -> float:
    """The largest difference over the largest value of ``reference``, or over ``smallest``.

    Computed in float64. NaN equals NaN; infinity where names or shapes differ.
    """
    if {k: v.shape for k, v in reference.items()} != {k: v.shape for k, v in other.items()}:
        return math.inf
    gap = max((_largest_gap(reference[name], other[name]) for name in reference), default=0.0)
    scale = max((_largest(_wide(value)) for value in reference.values()), default=0.0)
    return gap / max(scale, smallest, 1e-300) if gap else 0.0


def _largest(values: Tensor) -> float:
    return values.abs().nan_to_num(nan=0.0, posinf=0.0).max().item()


def _largest_gap(one: Tensor, other: Tensor) -> float:
    one, other = _wide(one), _wide(other)
    equal = (one == other) | (one.isnan() & other.isnan())
    gaps = (one - other).abs().masked_fill(equal, 0.0)
    return gaps.nan_to_num(nan=math.inf, posinf=math.inf).max().item()


def _wide(value: Tensor) -> Tensor:
    """At least float64, or complex128, and not empty."""
    return value.to(torch.promote_types(value.dtype, torch.float64)) if value.numel() else ZERO


@dataclass(frozen=True)
class Judge:
    """Compares runs with ``reference``, a run on one device."""

    reference: Record
    tolerance: float
    repeats: bool
    """A second run on one device was the same."""

    def __call__(self, other: Record, devices: int) -> tuple[str, ...]:
        """Loss, weights, metrics, verdict and reason, in words, of a run on ``devices`` devices."""
        found = difference(self.reference, other)
        same = found.within(self.tolerance)
        numbers = [
            f"{gap:.0e}" if gap else "0" for gap in (found.loss, found.weights, found.metrics)
        ]
        reason = "" if same else self.likely_reason(other, found, devices)
        return (*numbers, "same" if same else "differs", reason)

    def likely_reason(self, other: Record, found: Difference, devices: int) -> str:
        """From what can be seen of both runs; what is certain comes first."""
        if not self.repeats:
            return IRREPRODUCIBLE
        if other.world_size > 1 and max(found.loss, found.weights) <= self.tolerance:
            return RANK_METRIC.format(found.metric)
        seen = dict(other.traits)
        if _grows_with_share(self.reference, other):
            seen.setdefault("sum", f"its first is 1/{other.world_size} of one device's")
        rules = {
            **ANYWHERE,
            **(PER_RANK if other.world_size > 1 else {}),
            **(PER_SPLIT if devices > 1 else {}),
        }
        reasons = []
        if len(other.losses) != len(self.reference.losses):
            reasons = [f"{len(other.losses)} steps instead of {len(self.reference.losses)}"]
        reasons += [rules[name].format(seen[name]) for name in rules if name in seen]
        unexplained = ROUNDING.format(seen["rounding"]) if "rounding" in seen else UNKNOWN
        return "; ".join(reasons) or unexplained


def _grows_with_share(reference: Record, other: Record) -> bool:
    """A mean over W ranks of sums over 1/W of the batch is 1/W of the sum."""
    if other.world_size == 1 or not len(reference.losses):
        return False
    first, second = reference.losses[0].item(), other.losses[0].item()
    return math.isclose(first, other.world_size * second, rel_tol=1e-3) and first != 0.0
