"""Seeds and states of all generators: Python's, NumPy's, torch's."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch.

    Lightning's function of this name also leaves ``PL_GLOBAL_SEED`` in the environment, from where
    it reaches the next run, and resets every rank to the same draws.
    """
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Where the generators are, in plain types that load with ``weights_only``."""
    kind, keys, *rest = cast(tuple[Any, ...], numpy.random.get_state())
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype("int64")), *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, keys.cpu().numpy().astype("uint32"), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
