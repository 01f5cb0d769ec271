"""What `local_sgd` and `ddp_async` share: ddp whose backward pass exchanges nothing."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lockstep.exchange.saved import SavedExchangeStrategy

log = logging.getLogger(__name__)


class LocalStepsStrategy(SavedExchangeStrategy):
    """Gradients stay where they are; a subclass exchanges around the optimizer's step.

    Unequal shares of a batch weigh as under ddp (`ExactDDPStrategy`).
    """

    differs = ""
    """How the result depends on the number of processes; told once, when training starts."""

    exchanges_in_backward = False

    @override
    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        nothing = PostLocalSGDState(  # type: ignore[no-untyped-call]
            None, None, 0, post_local_gradient_allreduce=False
        )
        self.model.register_comm_hook(nothing, post_localSGD_hook)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self.is_global_zero and self.world_size > 1:
            log.info("%s: %s", self.saved_as, self.differs)

    def ends_here(self) -> bool:
        """The step under way is the last of an epoch, or of the run: all ranks know that."""
        trainer = self._trainer()
        return bool(trainer.is_last_batch) or trainer.global_step + 1 == trainer.max_steps

    def _trainer(self) -> Trainer:
        return self._own_module().trainer

    def _own_module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module


def trained(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, in its order."""
    return [
        item for group in optimizer.param_groups for item in group["params"] if item.requires_grad
    ]


def mean_over_ranks(tensors: list[Tensor]) -> list[Tensor]:
    """The mean of each tensor, new ones of the same shapes, by one all-reduce for all."""
    flat = torch.cat([item.detach().flatten() for item in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = torch.split(flat, [item.numel() for item in tensors])
    return [part.view_as(item).to(item) for part, item in zip(parts, tensors, strict=True)]
