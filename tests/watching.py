"""What `contract.Contract` looks at while a run trains, in each of its processes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lockstep.strategies.exact_ddp import batch_weight


def samples_in(batch: Any) -> int:
    """The samples are on dimension 0 of every tensor of a batch; raises AssertionError if not."""
    sizes = [len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    assert sizes, f"a batch must hold tensors with the samples on dimension 0; got {type(batch)}"
    assert len(set(sizes)) == 1, (
        f"every tensor of a batch must have the samples on dimension 0; got sizes {sizes}"
    )
    return sizes[0]


class Losses(Callback):
    """The loss of each training step, with the same draws (of dropout, say) in every step."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        torch.manual_seed(0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        if loss is None:  # optimized by hand
            loss = trainer.callback_metrics.get("train/loss")
        assert loss is not None, 'training_step must return its loss, or log it as "train/loss"'
        self.values.append(loss.detach().clone())


class SaveAfterFirstEpoch(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


class Watch(Callback):
    """Write, per rank, how many samples it was given, its last weights and its metrics."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.samples: Counter[str] = Counter()
        self.curve: list[dict[str, float]] = []
        self.weights: dict[str, Tensor] = {}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note_metrics(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_weight(trainer):
            self.samples["train"] += samples_in(batch)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self._count("val", trainer.val_dataloaders, batch)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self._count("test", trainer.test_dataloaders, batch)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights = {name: value.cpu() for name, value in pl_module.state_dict().items()}
        self._write(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer)

    def _count(self, stage: str, loader: Any, batch: Any) -> None:
        # A rank without a share gets one sample all the same, which no metric counts.
        if not getattr(getattr(loader, "sampler", None), "only_filler", False):
            self.samples[stage] += samples_in(batch)

    def _note_metrics(self, trainer: Trainer) -> None:
        self.curve.append({name: float(it) for name, it in trainer.callback_metrics.items()})

    def _write(self, trainer: Trainer) -> None:
        self._note_metrics(trainer)
        seen = {"samples": dict(self.samples), "curve": self.curve, "weights": self.weights}
        torch.save(seen, self.directory / f"watched-{trainer.global_rank}.pt")


def watched(directory: str) -> list[dict[str, Any]]:
    """What `Watch` wrote, by rank."""
    paths = sorted(Path(directory).glob("watched-*.pt"))
    return [torch.load(path, weights_only=True) for path in paths]
