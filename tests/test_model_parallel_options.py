"""What a person may ask of networks in parts is what the ranks do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from left import assert_weights_equal, weights
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from lockstep.callbacks.keep_last_good import KeepLastGood
from lockstep.errors import UsageError
from lockstep.modelparallel.fsdp import shard
from lockstep.modelparallel.mesh import Mesh
from lockstep.modelparallel.pipeline import Pipeline, PipelineStrategy
from lockstep.modelparallel.stages import Part

RUN = [
    "model=dropout",
    "optimizer=sgd",
    "optimizer.lr=0.1",
    "scheduler=none",
    "trainer.max_epochs=2",
    "data.datasets.train=401",  # 7 batches of 60; the last one has 41 samples
    "data.global_batch_size=60",
    "trainer.accumulate_grad_batches=2",
    "trainer.gradient_clip_algorithm=value",
    "trainer.gradient_clip_val=0.02",
]
PLAN = "+strategy.options.plan={network.1: outputs, network.2: inputs}"
"""Of a Sequential, which has none of its own."""


def layers(dropout: float) -> str:
    linear = "_target_: torch.nn.Linear, in_features"
    return (
        f"model.network._args_=[{{_target_: torch.nn.Dropout, p: {dropout}}}, "
        f"{{{linear}: 10, out_features: 64}}, {{{linear}: 64, out_features: 1}}]"
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("dropout", "where"),
    [
        pytest.param(0.5, ["strategy=tensor_parallel", PLAN], id="tensor_parallel"),
        pytest.param(0.0, ["strategy=fsdp"], id="fsdp"),
    ],
)
def test_dropout_accumulation_and_clipped_values_are_those_of_one_device(
    launch: Launch, tmp_path: Path, dropout: float, where: list[str]
) -> None:
    """Ranks of tensor_parallel see one share of the data, and so draw what one device draws."""
    run = [*RUN, layers(dropout)]
    one = launch(*run, directory=tmp_path / "one")
    split = launch(*run, *where, "trainer.devices=2", directory=tmp_path / "split")
    assert_weights_equal(weights(tmp_path / "split"), weights(tmp_path / "one"))
    assert max(split["parameter_bytes"]) < 0.6 * one["parameter_bytes"][0]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("units", "gathered"),
    [
        (None, ["network", "network.0", "network.1"]),
        (["network.1.*"], ["network", "network.1.0", "network.1.1"]),
    ],
)
def test_the_named_units_are_gathered_one_at_a_time(
    alone: None, units: list[str] | None, gathered: list[str]
) -> None:
    module = LightningModule()
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module.network = nn.Sequential(nn.Linear(2, 2), inner)
    shard(module, units, init_device_mesh("cpu", (1,)))
    found = [name for name, part in module.named_modules() if isinstance(part, FSDPModule)]
    assert sorted(found) == gathered
    with pytest.raises(UsageError, match=r"units must name modules; none is like blocks.\*"):
        shard(module, ["blocks.*"], init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize(("asked", "sizes"), [(3, [3, 3, 2]), (None, [4, 4]), (16, [1] * 8)])
def test_a_pipeline_makes_as_many_micro_batches_as_are_asked(
    alone: None, asked: int | None, sizes: list[int]
) -> None:
    seen: list[int] = []

    def double(rows: Tensor) -> Tensor:
        seen.append(len(rows))
        return 2 * rows

    strategy: Any = PipelineStrategy(Mesh(1, 1), asked)
    rows = torch.arange(16.0).reshape(8, 2).requires_grad_()
    pipeline = Pipeline([Part(double, [])], strategy.micro_batches, torch.device("cpu"))
    output = pipeline(rows)
    assert torch.equal(output, 2 * rows)
    (output * torch.arange(8.0)[:, None]).sum().backward()
    assert torch.equal(rows.grad, 2 * torch.arange(8.0)[:, None].expand(8, 2))
    assert seen == sizes
    with pytest.raises(UsageError, match=r"got 0\. Use for example 2"):
        PipelineStrategy(Mesh(1, 1), 0)


def test_rank_zero_does_not_begin_to_save_what_others_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Looking at weights in parts asks the others, which may have gone."""
    progress = SimpleNamespace(total=SimpleNamespace(ready=3, processed=2))
    trainer: Any = SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
        strategy=PipelineStrategy(Mesh(1, 2)),
        **{"is_global_zero": True, "global_step": 2, "training": True},
    )
    KeepLastGood(str(tmp_path)).on_exception(trainer, LightningModule(), RuntimeError())
    assert "each rank holds a part of the weights only" in caplog.text
    assert list(tmp_path.iterdir()) == []
