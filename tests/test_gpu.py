"""The same promise on GPUs. ``pytest -m gpu`` runs these where there are some."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Launch, on
from left import checkpoint

from lockstep.errors import UsageError

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
        *on("ddp", 1),
        "+callbacks.backend={_target_: faults.RequireNccl}",
    )
    assert result["status"] == "finished"


@one
@pytest.mark.parametrize("strategy", ["auto", "dp", "ddp"])
def test_bf16_mixed_trains_on_a_gpu(launch: Launch, strategy: str) -> None:
    where = [*on(strategy, 1), "trainer.precision=bf16-mixed"]
    result = launch(*FEW, *where, sweep=True)
    assert result["metrics"]["train/loss"] < 0.5
    assert all(peak > 0 for peak in result["peak_memory_bytes"])


@one
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_nan_on_a_gpu_stops_the_run_before_the_weights_change(
    launch: Launch, tmp_path: Path, micro_steps: int
) -> None:
    with pytest.raises(UsageError, match="must be finite; got nan at step 2"):
        launch(
            "data=with_nan",
            "model=linear",
            "callbacks=unmonitored",
            "trainer.accelerator=gpu",
            f"trainer.accumulate_grad_batches={micro_steps}",
            f"data.datasets.bad={2 * 8 * micro_steps}",
            "data.datasets.samples=64",
            "data.global_batch_size=8",
            "data.shuffle=false",
            directory=tmp_path / "run",
        )
    saved = checkpoint(tmp_path / "run", "last_good")
    assert saved["global_step"] == 2
    assert all(torch.isfinite(weight).all() for weight in saved["state_dict"].values())


@two
@pytest.mark.parametrize("strategy", ["dp", "ddp", "ddp_spawn"])
@pytest.mark.parametrize("devices", ["2", "[1,0]"])
def test_two_gpus_equal_one(launch: Launch, strategy: str, devices: str) -> None:
    single = launch(*FEW, "trainer.devices=1", sweep=True)
    spread = launch(*FEW, *on(strategy, devices), sweep=True)
    for name, value in single["metrics"].items():
        assert spread["metrics"][name] == pytest.approx(value, rel=1e-4), name


@one
def test_more_gpus_than_there_are_is_refused(launch: Launch) -> None:
    with pytest.raises(UsageError, match=f"must not exceed .* got {GPUS + 1}"):
        launch("trainer.accelerator=gpu", f"trainer.devices={GPUS + 1}")
