"""Print how one batch is split over replicas or ranks, as the documents do."""

from __future__ import annotations

import logging
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lockstep.group import gather
from lockstep.strategies.replicas import current_replica

log = logging.getLogger(__name__)

Seen = tuple[str, list[int], list[int]]


class Shapes(Callback):
    """For each training batch, the sizes inside each replica or rank, and outside.

    "Inside" is what ``network`` is called with; "outside" is what the step gives to and gets from
    the module: the whole global batch under dp, a rank's share of it under ddp.
    """

    def __init__(self) -> None:
        self._inside: list[Seen] = []
        self._outside: list[Seen] = []
        self._hooks: list[RemovableHandle] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        network = pl_module.network
        assert isinstance(network, nn.Module)
        self._hooks = [
            network.register_forward_hook(self._note_inside),
            pl_module.register_forward_hook(self._note_outside),
        ]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        process = f"rank {trainer.global_rank}" if trainer.world_size > 1 else "process"
        lines = [
            f"  in {where or process}: input {size}, output {output}"
            for where, size, output in sorted(self._inside)
        ] + [
            f"  outside, {process}: input {size}, output {output}"
            for _, size, output in self._outside
        ]
        self._inside, self._outside = [], []
        texts = gather("\n".join(lines))
        if trainer.is_global_zero:
            log.info("\n".join([f"batch {batch_idx}", *texts]))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note_inside(self, network: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._inside.append(_sizes(inputs, output))

    def _note_outside(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        # Lightning sends whole training steps through a ddp module's call too: first a batch.
        if current_replica() is None and isinstance(inputs[0], Tensor):
            self._outside.append(_sizes(inputs, output))


def _sizes(inputs: tuple[Tensor, ...], output: Tensor) -> Seen:
    replica = current_replica()
    where = "" if replica is None else f"replica {replica}"
    return where, list(inputs[0].shape), list(output.shape)
