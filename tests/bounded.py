"""Modules whose memory is counted, so that a search for a batch size can be told right or wrong."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.module import SupervisedModule
from lockstep.randomness import random_state

STATE, GRADIENTS = 2, 1
"""What the optimizer's state and the gradients take, in samples."""


class Bounded(SupervisedModule):
    """More than ``most[rank]`` samples and optimizer state in a forward pass, or gradients of the
    micro-steps before beside them in a backward pass, run out of memory.

    Ranks exchange a number in each step, as a loss over tokens does, and buffers change in it.
    """

    calls: Tensor

    def __init__(self, most: list[int], **parts: Any) -> None:
        super().__init__(**parts)
        self.most = most
        self.register_buffer("calls", torch.zeros(1))

    def on_train_start(self) -> None:
        super().on_train_start()
        self._before = copy.deepcopy(self._all_that_is())

    def on_train_end(self) -> None:
        now = self._all_that_is()
        changed = [name for name, value in now.items() if not _equal(value, self._before[name])]
        path = Path(self.trainer.default_root_dir) / f"changed-{self.global_rank}.json"
        path.write_text(json.dumps(changed))

    def _all_that_is(self) -> dict[str, Any]:
        (optimizer,) = self.trainer.optimizers
        gradients = {name: item.grad for name, item in self.named_parameters()}
        sums = {"train_loss": self.train_loss.total}
        state = {"optimizer": optimizer.state_dict(), "generators": random_state()}
        return {**self.state_dict(), **gradients, **sums, **state}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += torch.rand(1)
        loss = super().training_step(batch, batch_idx)
        if dist.is_initialized():
            dist.all_reduce(torch.ones(1))  # a rank that ran out of memory is missing here
        return loss

    def forward(self, *inputs: Tensor) -> Any:
        if self.training:
            self._taken = len(inputs[0]) + STATE * bool(self.trainer.optimizers[0].state)
            self._take(self._taken)
        return super().forward(*inputs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        held = any(item.grad is not None for item in self.parameters())
        self._take(self._taken + GRADIENTS * held)
        super().backward(loss, *args, **kwargs)

    def _take(self, samples: int) -> None:
        if samples > self.most[self.global_rank]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


class Hungry(SupervisedModule):
    """Takes 64 MiB of memory for each sample of a forward pass."""

    def forward(self, *inputs: Tensor) -> Any:
        taken = torch.ones(len(inputs[0]), 2**24)
        return super().forward(*inputs) + 0 * taken[0, 0]


class Broken(SupervisedModule):
    """Its second step raises, and not for want of memory."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.optimizers[0].state:
            raise RuntimeError("broken on purpose")
        return super().training_step(batch, batch_idx)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)
