"""What a run left in its directory, and when the weights of two are equal."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def checkpoint(directory: str | Path, name: str = "last") -> dict[str, Any]:
    path = Path(directory) / "checkpoints" / f"{name}.ckpt"
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def weights(directory: str | Path, key: str = "state_dict") -> dict[str, Tensor]:
    """Of the last checkpoint; ``key`` names those that an average is not in."""
    state: dict[str, Tensor] = checkpoint(directory)[key]
    return state


def network_weights(directory: str | Path) -> dict[str, Tensor]:
    """The network's last weights, by the names that it has for them."""
    prefix = "network."
    state = weights(directory).items()
    return {name.removeprefix(prefix): value for name, value in state if name.startswith(prefix)}


def flat(state: dict[str, Tensor]) -> Tensor:
    """One vector in float64."""
    return torch.cat([weight.double().flatten() for weight in state.values()])


def assert_weights_equal(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6, of: str = ""
) -> None:
    """No weight differs by more than ``tolerance`` times the largest of all."""
    assert actual.keys() == expected.keys()
    scale = max(weight.abs().max().item() for weight in expected.values())
    for name, weight in expected.items():
        difference = (actual[name].double() - weight.double()).abs().max().item()
        assert difference <= tolerance * scale, f"{of} {name}: {difference:.1e} of {scale:.1e}"


def table(path: str | Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a header."""
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def history(directory: str | Path) -> list[dict[str, str]]:
    """The rows of ``metrics.csv`` without the time, which is another in each run."""
    rows = table(Path(directory) / "metrics.csv")
    for row in rows:
        del row["seconds"]
    return rows


def column(directory: str | Path, name: str) -> list[float]:
    """What ``metrics.csv`` has of ``name``, top to bottom."""
    return [float(row[name]) for row in history(directory) if row.get(name)]
