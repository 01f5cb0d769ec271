"""How long the gradient is, before it is clipped."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override


class GradientNorm(Callback):
    """Logs ``train/grad_norm``: the 2-norm of the gradient that an optimizer step starts from.

    Of the global batch, accumulated, with the scale of 16-bit precision taken out, and before
    clipping: Lightning calls the hook when ranks have exchanged their gradients, so each computes
    the same number, and none is sent. Logged every ``trainer.log_every_n_steps``.
    """

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        gradients = [
            _dense(parameter.grad)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        # Where ranks hold parts of the gradient, the strategy knows how to put them together.
        norm_of = getattr(trainer.strategy, "norm", torch.nn.utils.get_total_norm)
        norm = norm_of(gradients)
        pl_module.log("train/grad_norm", norm, on_step=True, on_epoch=False)


def _dense(gradient: Tensor) -> Tensor:
    """The numbers that there are, of a sparse gradient."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
