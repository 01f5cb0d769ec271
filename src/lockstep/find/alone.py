"""Steps of one rank without the others, which leave nothing behind."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from lockstep.group import in_group
from lockstep.randomness import random_state, set_random_state


@contextmanager
def alone(trainer: Trainer) -> Iterator[None]:
    """Within, no gradient, buffer or number is exchanged: a rank whose memory ran out would be
    missing where the others wait.

    Lightning calls the module itself and not its DDP wrapper, whose buckets stay in memory: not
    ``no_sync``, in which the first forward still broadcasts the buffers. What a module exchanges by
    itself in the default group (the number of its tokens, say) it does with a group of its own.
    """
    strategy, several = trainer.strategy, in_group()
    wrapped = strategy.model
    everyone = torch.distributed.group.WORLD if several else None
    strategy.model = strategy.lightning_module
    if several:
        rank = torch.distributed.get_rank()
        own = torch.distributed.new_group([rank], use_local_synchronization=True)
        assert isinstance(own, torch.distributed.ProcessGroup), "this rank is its member"
        torch.distributed.group.WORLD = own
    try:
        yield
    finally:
        strategy.model = wrapped
        if several:
            torch.distributed.group.WORLD = everyone


@contextmanager
def undone(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Afterwards weights, optimizer, metrics and generators are as before, and gradients gone."""
    weights = {name: _kept(value) for name, value in module.state_dict().items()}
    (optimizer,) = trainer.optimizers
    state = copy.deepcopy(optimizer.state_dict())
    generators = random_state()
    try:
        yield
    finally:
        optimizer.zero_grad(set_to_none=True)
        optimizer.load_state_dict(state)
        module.load_state_dict(weights)
        for part in module.modules():
            if isinstance(part, Metric):
                part.reset()
        set_random_state(generators)


def _kept(value: object) -> object:
    """A copy that takes nothing on the device."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
