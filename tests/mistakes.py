"""Modules with one mistake each, which `contract.Contract` must find."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lockstep.module import Batch, SupervisedModule


class Transposes(SupervisedModule):
    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        return super().predict_step(batch, batch_idx).T


class Forgets(SupervisedModule):
    """Its loss depends on a count that no checkpoint holds."""

    steps = 0

    def predict_and_loss(self, batch: Batch) -> tuple[Any, Tensor, int]:
        self.steps += 1
        prediction, loss, samples = super().predict_and_loss(batch)
        return prediction, loss * self.steps, samples
