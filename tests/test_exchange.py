"""The cost of exchanging gradients is measured, and measuring it changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import DDP2, SMALL, Launch, on
from torch.nn.parallel import DistributedDataParallel

from lockstep.callbacks.exchange import ROUNDS, ExchangeCost

pytestmark = pytest.mark.processes
BATCH_NORM = ["data=indexed", "model=batch_norm", "optimizer=sgd", "optimizer.lr=1e-3"]


@pytest.mark.parametrize("devices", [2, 3])
def test_ranks_of_ddp_tell_share_and_bytes(launch: Launch, devices: int) -> None:
    where = [*on("ddp", devices), "data.global_batch_size=12"]
    result = launch(*SMALL, *where, "compare=true", "model.network.out_features=1")
    gradients = (10 + 1) * 4
    assert result["exchanged_bytes_per_step"] == round(2 * (devices - 1) / devices * gradients)
    assert 0 <= result["exchange_share"] <= 1
    assert result["exchange_s"] >= 0


@pytest.mark.parametrize("where", [[], on("dp")])
def test_one_process_exchanges_no_gradients(launch: Launch, where: list[str]) -> None:
    result = launch(*SMALL, *where, "compare=true")
    assert result["exchange_share"] is None
    assert result["exchanged_bytes_per_step"] is None


def test_ordinary_runs_do_not_measure(launch: Launch) -> None:
    assert "exchange_share" not in launch(*SMALL, *DDP2)


def test_measuring_leaves_the_module_as_it_was(launch: Launch, tmp_path: Path) -> None:
    """Predictions are made after training, by the weights and buffers that training left."""
    where = [*DDP2, "predict=true", "callbacks=unmonitored"]
    for name, compare in (("with", "true"), ("without", "false")):
        run = [*BATCH_NORM, *where, f"compare={compare}", "trainer.max_epochs=1"]
        launch(*run, directory=tmp_path / name)
    first, second = (torch.load(tmp_path / n / "predictions.pt") for n in ("with", "without"))
    assert torch.equal(first, second)


def test_gradients_are_exchanged_in_every_other_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process group of one, whose all-reduces are counted."""
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        network = torch.nn.Linear(3, 1)
        model = DistributedDataParallel(network)
        exchanged = []

        def count(_, bucket):  # without annotations: torch compares them
            exchanged.append(bucket.index())
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model.register_comm_hook(None, count)

        class Strategy:
            def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
                result: torch.Tensor = model(batch).sum()
                return result

        class Trainer:
            strategy, world_size = Strategy(), 1

        cost = ExchangeCost()
        cost._batch = torch.ones(2, 3)
        before = [weight.clone() for weight in network.parameters()]
        assert cost._measure(Trainer(), network, model) >= 0
        assert len(exchanged) == ROUNDS + 1
        assert all(map(torch.equal, before, network.parameters()))
        assert all(weight.grad is None for weight in network.parameters())
    finally:
        dist.destroy_process_group()
