"""What the exchange of gradients costs: the same batch with it and without it, after training."""

from __future__ import annotations

import time
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lockstep.group import gather
from lockstep.randomness import random_state, set_random_state
from lockstep.traffic import gradient_bytes, through_ring

ROUNDS = 10


class ExchangeCost(Callback):
    """Times forward and backward in turn with gradients exchanged and in DDP's ``no_sync``.

    It runs once, when training has ended; weights, buffers and generators are as before. On one
    process there is nothing to exchange; dp exchanges inputs and outputs, which this cannot leave
    out, so there it measures nothing. Those of `lockstep.exchange` tell their own bytes;
    what exchanges nothing in the backward pass has no ``exchange_s``.
    """

    def __init__(self) -> None:
        self._batch: Any = None
        self._seconds: float | None = None
        self._bytes: int | None = None

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._batch is None:
            self._batch = batch

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = trainer.strategy.model
        told = getattr(trainer.strategy, "bytes_per_step", None)
        if isinstance(model, DistributedDataParallel) and self._batch is not None:
            if getattr(trainer.strategy, "exchanges_in_backward", True):
                self._seconds = self._measure(trainer, pl_module, model)
            ring = through_ring(gradient_bytes(pl_module), trainer.world_size)
            self._bytes = round(told() if told else ring)
        self._batch = None

    def measured(self, step_s: float | None) -> dict[str, float | int | None]:
        """``exchange_share``: of a median step; ``exchanged_bytes_per_step``: what each link of the
        ring moves, 2 (N - 1) / N of the gradients (Patarasu and Yuan 2009)."""
        share = self._seconds / step_s if self._seconds is not None and step_s else None
        return {
            "exchange_s": self._seconds,
            "exchange_share": None if share is None else min(1.0, share),
            "exchanged_bytes_per_step": self._bytes,
        }

    def _measure(
        self, trainer: Trainer, module: LightningModule, model: DistributedDataParallel
    ) -> float:
        """Seconds that the exchange adds to a step, the mean over ranks; 0 when it hides."""
        generators = random_state()
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        vars(module)["log"] = lambda *_, **__: None  # these steps belong to no epoch
        try:
            pairs = [
                (self._step(trainer, model, True), self._step(trainer, model, False))
                for _ in range(1 + ROUNDS)  # the first warms up
            ]
        finally:
            del vars(module)["log"]
            model.zero_grad(set_to_none=True)
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
            set_random_state(generators)
        added = median(both for both, _ in pairs[1:]) - median(alone for _, alone in pairs[1:])
        return max(0.0, float(sum(gather(added))) / trainer.world_size)

    def _step(self, trainer: Trainer, model: DistributedDataParallel, exchange: bool) -> float:
        model.zero_grad(set_to_none=True)
        torch.distributed.barrier()
        started = time.perf_counter()
        with nullcontext() if exchange else model.no_sync():
            output: Any = trainer.strategy.training_step(self._batch, 0)
            (output["loss"] if isinstance(output, dict) else output).backward()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - started
