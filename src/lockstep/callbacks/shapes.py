"""Print how one batch is split over replicas or ranks, as the documents do."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lockstep.strategies.data_parallel import current_replica

log = logging.getLogger(__name__)

Seen = tuple[str, list[int], list[int]]


class Shapes(Callback):
    """For each training batch, the sizes inside each replica or rank, and outside.

    "Inside" is what ``network`` is called with; "outside" is the batch that the step works on: the
    whole global batch under dp, a rank's share of it under ddp.
    """

    def __init__(self) -> None:
        self._seen: list[Seen] = []
        self._hook: RemovableHandle | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        network = pl_module.network
        assert isinstance(network, nn.Module)
        self._hook = network.register_forward_hook(self._note)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        inside, self._seen = sorted(self._seen), []
        rank = f"rank {trainer.global_rank}" if trainer.world_size > 1 else "process"
        lines = [f"  in {where or rank}: input {size}, output {out}" for where, size, out in inside]
        lines.append(f"  outside, {rank}: input {list(batch[0].shape)}, target {list(batch[-1].shape)}")
        texts = _of_all_ranks("\n".join(lines), trainer.world_size)
        if trainer.is_global_zero:
            log.info("\n".join([f"batch {batch_idx}", *texts]))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _note(self, network: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        replica = current_replica()
        where = "" if replica is None else f"replica {replica}"
        self._seen.append((where, list(inputs[0].shape), list(output.shape)))


def _of_all_ranks(text: str, world_size: int) -> list[str]:
    if world_size == 1:
        return [text]
    texts = [""] * world_size
    torch.distributed.all_gather_object(texts, text)
    return texts
