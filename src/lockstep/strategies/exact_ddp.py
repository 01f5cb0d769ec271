"""``ddp``, whose gradients are those of the global batch when ranks hold unequal shares of it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lockstep.data.sharding import TrainShards


def batch_weight(trainer: Trainer) -> float:
    """What this rank's mean loss counts in the current training batch; see `TrainShards.weight`.

    0 marks the one sample that a rank without a share joined the step with. It is 1 for loaders of
    a user's own, which know no global batch.
    """
    sampler = getattr(trainer.train_dataloader, "sampler", None)
    if not isinstance(sampler, TrainShards):
        return 1.0
    return sampler.weight(trainer.fit_loop.epoch_loop.batch_idx)


def weighted(loss: Tensor, trainer: Trainer) -> Tensor:
    """A rank's loss, so that the mean of the ranks' gradients is that of the global batch."""
    weight = batch_weight(trainer)
    return loss * weight if weight != 1.0 else loss


class ExactDDPStrategy(DDPStrategy):
    """Weighs each rank's loss on its way into the backward pass.

    Here rather than in a module, so that it holds for every LightningModule: ``manual_backward``
    comes through here as well. What a training step returns and logs stays unweighted.
    """

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        assert self.lightning_module is not None
        loss = weighted(closure_loss, self.lightning_module.trainer)
        return super().backward(loss, optimizer, *args, **kwargs)
