"""Count what each rank hands to torch.distributed while it trains, whoever calls it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

PAYLOAD = ("isend", "irecv", "all_reduce")


class Traffic(Callback):
    """Write, per rank, bytes and calls of `PAYLOAD` in training steps, of the default group."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.bytes: Counter[str] = Counter()
        self.steps = 0
        self._patches: list[Any] = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        for name in PAYLOAD:
            real = getattr(dist, name)

            def counted(
                tensor: Tensor, *args: Any, _name: str = name, _real: Any = real, **kw: Any
            ) -> Any:
                self.bytes[_name] += tensor.numel() * tensor.element_size()
                return _real(tensor, *args, **kw)

            patch = mock.patch.object(dist, name, counted)
            patch.start()
            self._patches.append(patch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.steps += 1
        while self._patches:
            self._patches.pop().stop()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        weights = [item.detach() for item in pl_module.parameters()]
        torch.save(weights, self.directory / f"weights{trainer.global_rank}.pt")
        seen = {name: self.bytes[name] for name in PAYLOAD} | {"steps": self.steps}
        (self.directory / f"traffic{trainer.global_rank}.json").write_text(json.dumps(seen))


def traffic(directory: Path) -> list[dict[str, int]]:
    """What each rank wrote, in rank order."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob("traffic*.json"))]


def ranks_agree(directory: Path) -> bool:
    """All ranks ended with the same weights, bit for bit."""
    first, *others = (torch.load(path) for path in directory.glob("weights*.pt"))
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
