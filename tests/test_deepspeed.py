"""What can be known of ``strategy=deepspeed`` without GPUs: its config, and what it refuses."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from conftest import Launch, compose_config
from lightning.pytorch.strategies import deepspeed as lightning_deepspeed

from lockstep.config import Config, StrategyConfig
from lockstep.errors import UsageError
from lockstep.modelparallel import mesh
from lockstep.modelparallel.chosen import model_parallel
from lockstep.modelparallel.mesh import Mesh, mesh_of
from lockstep.placement import Placement
from lockstep.strategies.exact_ddp import ExactDDPStrategy

ON_GPUS = Placement("ranks", "deepspeed", "gpu", 2, 2)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the making of a strategy asks for the package."""
    package: Any = ModuleType("deepspeed")
    package.utils = SimpleNamespace(logging=SimpleNamespace(logger=logging.getLogger("none")))
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    monkeypatch.setattr(mesh, "find_spec", lambda _: object())
    for name in ("_DEEPSPEED_AVAILABLE", "_DEEPSPEED_GREATER_EQUAL_0_16"):
        monkeypatch.setattr(lightning_deepspeed, name, True)


def test_it_is_refused_on_cpus_and_without_its_package_before_any_process(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_starts(*_: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("lockstep.launch.in_ranks", nothing_starts)
    with pytest.raises(UsageError, match=r"accelerator=cpu. Use trainer.strategy=fsdp"):
        launch("strategy=deepspeed", "trainer.devices=2", "trainer.accelerator=cpu")
    monkeypatch.setattr(mesh, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'lockstep\[deepspeed\]'"):
        mesh_of(Config(), ON_GPUS)


def test_what_would_break_a_promise_is_refused(installed: None) -> None:
    config = Config()
    assert mesh_of(config, ON_GPUS) == Mesh(data=4, model=1)
    config.trainer = replace(config.trainer, accumulate_grad_batches=2)
    with pytest.raises(UsageError, match=r"accumulate_grad_batches=2. Use 1"):
        mesh_of(config, ON_GPUS)
    for folders in (Config(resume="outputs/x"), Config()):
        folders.launch.max_restarts = 0 if folders.resume else 3
        with pytest.raises(UsageError, match=r"writes folders as checkpoints"):
            mesh_of(folders, ON_GPUS)
    wrong = Config(strategy=StrategyConfig("deepspeed", {"stge": 3}))
    with pytest.raises(UsageError, match=r"options.stge is no option .* stage"):
        model_parallel(wrong, ON_GPUS)


def test_the_preset_makes_zero_2_of_lightning_with_weighed_batches(
    installed: None, tmp_path: Path
) -> None:
    composed = compose_config(["strategy=deepspeed", "strategy.timeout_s=7"], tmp_path)
    options = {str(key): value for key, value in composed.strategy.options.items()}
    config = Config(strategy=StrategyConfig("deepspeed", options, composed.strategy.timeout_s))
    made: Any = model_parallel(config, ON_GPUS)
    assert composed.trainer.strategy == "deepspeed"
    assert made.config["zero_optimization"]["stage"] == 2
    assert made._timeout.total_seconds() == 7
    assert type(made).backward is ExactDDPStrategy.backward
