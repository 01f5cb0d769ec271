"""Other ways of exchanging give what they say, and move the bytes that they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Launch
from counting import traffic

RUN = [
    "data=indexed",
    "data.datasets.train=67",  # 6 batches of 12; the last one has 7 samples
    "data.global_batch_size=12",
    "model=mlp",
    "model.network.features=10",
    "model.network.width=32",
    "optimizer=sgd",
    "optimizer.lr=1e-4",
    "callbacks=recording",
    "trainer.max_epochs=2",
]
COUNTED = (
    "+callbacks.traffic={_target_: counting.Traffic, directory: '${hydra:runtime.output_dir}'}"
)
GRADIENTS = 4 * ((10 + 1) * 32 + (32 + 1) * 32 + 32 + 1)
"""Bytes of all gradients of `RUN`'s network."""


def weights(directory: Path, name: str = "last") -> torch.Tensor:
    state = torch.load(directory / "checkpoints" / f"{name}.ckpt", weights_only=True)["state_dict"]
    return torch.cat([value.double().flatten() for key, value in state.items() if "network" in key])


def apart(one: Path, other: Path) -> float:
    """The largest difference of two runs' last weights, relative to the largest weight."""
    first, second = weights(one), weights(other)
    return float((first - second).abs().max() / second.abs().max())


@pytest.mark.processes
def test_a_parameter_server_gives_the_weights_of_ddp(launch: Launch, tmp_path: Path) -> None:
    """Rank 0 receives (W - 1) times the gradients in each step, the others once."""
    launch(*RUN, directory=tmp_path / "single")
    for ranks in (2, 3, 4):
        where = [f"trainer.devices={ranks}", COUNTED]
        launch(*RUN, "strategy=ddp_ps", *where, directory=tmp_path / f"ps{ranks}")
        launch(*RUN, "strategy=ddp", *where[:1], directory=tmp_path / f"ddp{ranks}")
        assert apart(tmp_path / f"ps{ranks}", tmp_path / f"ddp{ranks}") < 1e-6, ranks
        assert apart(tmp_path / f"ps{ranks}", tmp_path / "single") < 1e-6, ranks
        server, *workers = traffic(tmp_path / f"ps{ranks}")
        each = 12 * GRADIENTS
        assert server == {
            "isend": (ranks - 1) * each,
            "irecv": (ranks - 1) * each,
            "all_reduce": 0,
            "steps": 12,
        }
        assert workers == [{"isend": each, "irecv": each, "all_reduce": 0, "steps": 12}] * (
            ranks - 1
        )
