"""One run of lockstep in this process, as ``python train.py`` does it, for a comparison."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback
from omegaconf import open_dict

from benchmarks.timing import PROJECT

from lockstep.config import register
from lockstep.prepare import prepare
from lockstep.run import build_here, compute

CONF = PROJECT / "benchmarks" / "conf"
TRAINING = (
    "optimizer=sgd",
    "optimizer.lr=0.01",
    "scheduler=none",
    "callbacks=unmonitored",
    "trainer.max_epochs=1",
    "launch.threads=1",
    "test=false",
)
"""Training alone, as the loops by hand: one epoch, its loss logged."""


def outcome_of(
    overrides: Sequence[str],
    directory: Path,
    watching: Sequence[Callback] = (),
    training: Sequence[str] = TRAINING,
) -> dict[str, Any]:
    """What ``result.json`` would hold of one training run on this process's devices."""
    register()
    directory.mkdir(parents=True, exist_ok=True)
    with initialize_config_dir(str(PROJECT / "conf"), version_base="1.3", job_name="train"):
        settings = [f"hydra.searchpath=[file://{CONF}]", f"hydra.run.dir={directory}"]
        composed = compose("train", [*settings, *training, *overrides], return_hydra_config=True)
    with open_dict(composed):
        composed.hydra.runtime.output_dir = str(directory)
        HydraConfig.instance().set_config(composed)
        del composed["hydra"]  # as Hydra does it; its own config stays behind
    run = prepare(composed)
    built = build_here(run)
    built.trainer.callbacks.extend(watching)
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        return compute(built, run)


def step_s(outcome: dict[str, Any]) -> float:
    """Seconds of a median step, of an outcome or of a ``result.json``."""
    return float(outcome["global_batch_size"] / outcome["samples_per_second"])
