"""``ddp_async``: a step applies the gradient of the step before, exchanged while it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lockstep.errors import UsageError
from lockstep.exchange.local_steps import LocalStepsStrategy, trained
from lockstep.traffic import size_of, through_ring


class AsyncDDPStrategy(LocalStepsStrategy):
    """Bounded staleness 1 (Ho et al. 2013, https://papers.nips.cc/paper/4894).

    The first step of an epoch leaves the weights as they are; the last one applies two gradients,
    its own as well: each gradient counts once, and evaluation at an epoch's end has nothing
    outstanding. All ranks apply the same means, so they hold the same weights after each step. One
    process exchanges nothing, delays nothing, and is plain training.
    """

    saved_as = "ddp_async"
    differs = "gradients are applied one step late; results differ from one process's"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sum: Tensor | None = None
        """Of the ranks' gradients of the step before, flat; on its way while ``_work`` is."""
        self._work: dist.Work | None = None

    def bytes_per_step(self) -> float:
        """That each link of the ring moves."""
        return through_ring(size_of(trained(self.optimizers[0])), self.world_size)

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        again = any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers)
        if (
            again
            or len(self.optimizers) > 1
            or getattr(self.precision_plugin, "scaler", None) is not None
        ):
            raise UsageError(
                "trainer.strategy=ddp_async delays one gradient a step of one optimizer, unscaled; "
                f"got {', '.join(type(item).__name__ for item in self.optimizers)} and "
                f"trainer.precision={self.precision_plugin.precision}. Use trainer.strategy=ddp, "
                "or trainer.precision=bf16-mixed."
            )

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        if self.world_size == 1:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def late() -> Any:
            output = closure()
            own = _flat(trained(optimizer))
            self._put(optimizer)
            self._sum, self._work = own, dist.all_reduce(own, async_op=True)
            return output

        output = super().optimizer_step(optimizer, late, model, **kwargs)
        if self.ends_here():
            self._drain(model)
        return output

    @override
    def on_train_end(self) -> None:
        if self._sum is not None:
            self._drain(self.lightning_module)
        super().on_train_end()

    @override
    def exchange_state(self) -> dict[str, Any]:
        return {"outstanding": None if self._sum is None else self._received().cpu()}

    @override
    def load_exchange_state(self, state: dict[str, Any]) -> None:
        outstanding = state["outstanding"]
        self._sum = None if outstanding is None else outstanding.to(self.root_device)

    def _drain(self, model: Any) -> None:
        """Apply what is outstanding, with the clipping that every step has."""
        (optimizer,) = self.optimizers
        super().optimizer_step(optimizer, lambda: self._put(optimizer), model)
        self._sum = None

    def _put(self, optimizer: Optimizer) -> None:
        """The mean of the step before becomes the gradient; none: the optimizer passes over it."""
        parameters = trained(optimizer)
        if self._sum is None:
            for item in parameters:
                item.grad = None
            return
        mean = self._received() / self.world_size
        parts = torch.split(mean, [item.numel() for item in parameters])
        for item, part in zip(parameters, parts, strict=True):
            item.grad = part.view_as(item)

    def _received(self) -> Tensor:
        assert self._sum is not None
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._sum


def _flat(parameters: list[Tensor]) -> Tensor:
    """The gradients as one vector, a copy; a parameter without one counts as zero."""
    return torch.cat(
        [
            (torch.zeros_like(item) if item.grad is None else item.grad).flatten()
            for item in parameters
        ]
    )
