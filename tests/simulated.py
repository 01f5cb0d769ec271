"""What ranks compute under `local_sgd` and `ddp_async`, in plain torch and one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from recording import indexed
from torch import Tensor, nn

from lockstep.data.sharding import TrainShards
from lockstep.data.tensors import Tensors
from lockstep.models.mlp import MLP

SAMPLES, BATCH, EPOCHS, RATE, STEPS = 67, 12, 2, 1e-4, 6


def start(state: dict[str, Tensor]) -> MLP:
    network = MLP(features=10, outputs=1, width=32, depth=2)
    network.load_state_dict(state)
    return network


def shares(ranks: int) -> Iterator[tuple[bool, list[tuple[Tensor, Tensor, float]]]]:
    """Per step: whether it ends an epoch; per rank inputs, target and what its mean loss weighs."""
    data = indexed(SAMPLES, 33, 33).train
    assert isinstance(data, Tensors)
    made = [
        TrainShards(data, global_batch_size=BATCH, rank=rank, world_size=ranks, seed=0)
        for rank in range(ranks)
    ]
    for epoch in range(EPOCHS):
        for shard in made:
            shard.set_epoch(epoch)
        split = [shard.indices().split(BATCH // ranks) for shard in made]
        for step in range(STEPS):
            rows = [parts[step] for parts in split]
            inputs, targets = data.tensors
            weights = [shard.weight(step) for shard in made]
            yield (
                step == STEPS - 1,
                [(inputs[r], targets[r], w) for r, w in zip(rows, weights, strict=True)],
            )


def validation_loss(weights: Tensor, state: dict[str, Tensor]) -> float:
    network, data = start(state), indexed(SAMPLES, 33, 33).val
    assert isinstance(data, Tensors)
    nn.utils.vector_to_parameters(weights, network.parameters())
    inputs, target = data.tensors
    return nn.functional.mse_loss(network(inputs), target).item()


def gradient(network: nn.Module, share: tuple[Tensor, Tensor, float]) -> Tensor:
    inputs, target, weight = share
    loss = nn.functional.mse_loss(network(inputs), target) * weight
    return _flat(torch.autograd.grad(loss, list(network.parameters())))


def local_sgd(
    state: dict[str, Tensor], ranks: int, period: int, steps: int = STEPS * EPOCHS
) -> Tensor:
    """The mean of the ranks' weights after ``steps``, flat."""
    networks = [copy.deepcopy(start(state)) for _ in range(ranks)]
    for step, (ends, batch) in zip(range(1, steps + 1), shares(ranks), strict=False):
        moved = [
            _flat(list(network.parameters())) - RATE * gradient(network, share)
            for network, share in zip(networks, batch, strict=True)
        ]
        if ends or step % period == 0:
            moved = [torch.stack(moved).mean(0)] * ranks
        for network, flat in zip(networks, moved, strict=True):
            nn.utils.vector_to_parameters(flat.clone(), network.parameters())
    return torch.stack([_flat(list(network.parameters())) for network in networks]).mean(0)


def ddp_async(state: dict[str, Tensor], ranks: int) -> Tensor:
    """Flat weights after `EPOCHS`: each step applies the mean gradient of the one before."""
    network, before = start(state), None
    for ends, batch in shares(ranks):
        mean = torch.stack([gradient(network, share) for share in batch]).mean(0)
        flat = _flat(list(network.parameters()))
        for late in [before, mean] if ends else [before]:
            flat = flat if late is None else flat - RATE * late
        before = None if ends else mean
        nn.utils.vector_to_parameters(flat, network.parameters())
    return _flat(list(network.parameters()))


def _flat(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return torch.cat([item.detach().flatten() for item in tensors])
