"""Exact evaluation and predictions for any number of ranks and samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import SMALL, Launch, on

from lockstep.errors import UsageError
from lockstep.predictions import interleave

pytestmark = pytest.mark.processes
BINARY = ["data=binary", "model=auroc", "optimizer=sgd", "optimizer.lr=0.1", "trainer.max_epochs=2"]
PLACES = [
    pytest.param(strategy, devices, id=f"{strategy}-{devices}")
    for strategy, devices in (("dp", 2), ("ddp", 2), ("ddp", 3), ("ddp", 4), ("ddp_spawn", 2))
]


@pytest.mark.parametrize(("strategy", "devices"), PLACES)
@pytest.mark.parametrize("samples", [101, 3])
def test_metrics_that_are_no_means_equal_one_device(
    launch: Launch, strategy: str, devices: int, samples: int
) -> None:
    overrides = [*BINARY, f"data.datasets.test={samples}", "data.global_batch_size=24"]
    single = launch(*overrides)
    where = on(strategy, devices)
    spread = launch(*overrides, *where)
    assert spread["samples_seen"] == single["samples_seen"]
    assert torch.tensor(single["metrics"]["test/confusion"]).sum() == samples
    for name in ("auroc", "average_precision", "confusion", "loss"):
        for stage in ("val", "test"):
            value = single["metrics"][f"{stage}/{name}"]
            other = torch.tensor(spread["metrics"][f"{stage}/{name}"], dtype=torch.float64)
            same = torch.tensor(value, dtype=torch.float64)
            torch.testing.assert_close(other, same, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("strategy", "devices"), PLACES)
@pytest.mark.parametrize("samples", [33, 2])
def test_predictions_are_one_file_in_data_set_order(
    launch: Launch, strategy: str, devices: int, samples: int
) -> None:
    overrides = [
        *SMALL,
        "predict=true",
        "data.global_batch_size=12",
        f"data.datasets.test={samples}",
        "optimizer.lr=0",
    ]
    single = launch(*overrides)
    expected = torch.load(single["predictions"], weights_only=True)
    assert expected.shape == (samples, 1)
    where = on(strategy, devices)
    spread = launch(*overrides, *where)
    torch.testing.assert_close(torch.load(spread["predictions"], weights_only=True), expected)
    assert Path(spread["predictions"]) == Path(spread["directory"]) / "predictions.pt"
    assert not list(Path(spread["directory"]).glob("*.part"))


def test_interleaved_shards_are_in_order_for_nested_tensors() -> None:
    rows = torch.arange(7)
    shards = [{"a": rows[rank::3], "b": (rows[rank::3] * 10,)} for rank in range(3)]
    merged = interleave(shards, 7)
    assert merged["a"].tolist() == list(range(7))
    assert merged["b"][0].tolist() == [10 * i for i in range(7)]


def test_predict_without_data_to_predict_is_refused(launch: Launch) -> None:
    with pytest.raises(UsageError, match="needs a test or predict split"):
        launch(
            "data=drawing",
            "model=linear",
            "model.network.out_features=3",
            "predict=true",
            "callbacks=unmonitored",
            "trainer.max_epochs=1",
            "objective=null",
        )
