"""The same promise on GPUs. ``pytest -m gpu`` runs these where there are some."""

from __future__ import annotations

import pytest
import torch
from conftest import Launch

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.processes]
one = pytest.mark.skipif(GPUS < 1, reason="needs 1 GPU")
two = pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
FEW = ["trainer.max_epochs=2", "data.datasets.train=500", "trainer.accelerator=gpu"]


@one
@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_one_gpu_equals_the_cpu_to_float32(launch: Launch, strategy: str) -> None:
    cpu = launch(*FEW[:-1], "trainer.accelerator=cpu")
    gpu = launch(*FEW, f"trainer.strategy={strategy}", "trainer.devices=[0]", sweep=True)
    assert gpu["accelerator"] == "gpu"
    for name, value in cpu["metrics"].items():
        assert gpu["metrics"][name] == pytest.approx(value, rel=1e-3), name


@one
def test_ddp_on_a_gpu_talks_over_nccl(launch: Launch) -> None:
    result = launch(
        *FEW,
        "trainer.strategy=ddp",
        "trainer.devices=1",
        "+callbacks.backend={_target_: faults.RequireNccl}",
    )
    assert result["status"] == "finished"


@one
@pytest.mark.parametrize("strategy", ["auto", "dp", "ddp"])
def test_bf16_mixed_trains_on_a_gpu(launch: Launch, strategy: str) -> None:
    where = [f"trainer.strategy={strategy}", "trainer.devices=1", "trainer.precision=bf16-mixed"]
    result = launch(*FEW, *where, sweep=True)
    assert result["metrics"]["train/loss"] < 0.5
    assert all(peak > 0 for peak in result["peak_memory_bytes"])


@two
@pytest.mark.parametrize("strategy", ["dp", "ddp", "ddp_spawn"])
@pytest.mark.parametrize("devices", ["2", "[1,0]"])
def test_two_gpus_equal_one(launch: Launch, strategy: str, devices: str) -> None:
    single = launch(*FEW, "trainer.devices=1", sweep=True)
    spread = launch(*FEW, f"trainer.strategy={strategy}", f"trainer.devices={devices}", sweep=True)
    for name, value in single["metrics"].items():
        assert spread["metrics"][name] == pytest.approx(value, rel=1e-4), name


@one
def test_more_gpus_than_there_are_is_refused(launch: Launch) -> None:
    from lockstep.errors import UsageError

    with pytest.raises(UsageError, match=f"must not exceed .* got {GPUS + 1}"):
        launch("trainer.accelerator=gpu", f"trainer.devices={GPUS + 1}")
