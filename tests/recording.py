"""Data sets, modules and callbacks that make visible what a run really did, on every rank."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch
import torch.distributed
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.data import Splits
from lockstep.data.tensors import Tensors
from lockstep.module import SupervisedModule


def indexed(train: int, val: int, test: int) -> Splits:
    """Ten random features; the target ``(n, 1)`` of a sample is its index."""

    def part(samples: int, seed: int) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(samples, 10, generator=generator)
        return Tensors(features, torch.arange(samples, dtype=torch.float32).unsqueeze(1))

    return Splits(part(train, 1), part(val, 2), part(test, 3))


def with_nan(samples: int, bad: int) -> Splits:
    """Like `indexed`, but the target of sample ``bad`` is NaN, in training only."""
    splits = indexed(samples, samples, samples)
    assert isinstance(splits.train, Tensors)
    splits.train.tensors[1][bad] = float("nan")
    return splits


class Recorder(Callback):
    """Write, per rank, what each batch held, and the process it was in."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._write("train", trainer, batch, batch_idx)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._write("val", trainer, batch, batch_idx)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._write("test", trainer, batch, batch_idx)

    def _write(self, stage: str, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        grouped = torch.distributed.is_initialized()
        row = {
            "stage": stage,
            "epoch": trainer.current_epoch,
            "batch": batch_idx,
            "indices": [int(index) for index in batch[-1].flatten()],
            "pid": os.getpid(),
            "world_size": torch.distributed.get_world_size() if grouped else 1,
            "threads": torch.get_num_threads(),
            "lr": trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None,
        }
        path = Path(self.directory) / f"seen-{trainer.global_rank}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def rows(directory: Path) -> list[dict[str, Any]]:
    """What `Recorder` wrote, of all ranks, with the rank added."""
    return [
        json.loads(line) | {"rank": int(path.stem.rpartition("-")[2])}
        for path in sorted(directory.glob("seen-*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def global_batches(directory: Path, stage: str = "train") -> dict[tuple[int, int], list[int]]:
    """(epoch, batch) -> the sorted sample indices of that global batch, over all ranks."""
    batches: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in rows(directory):
        if row["stage"] == stage:
            batches[row["epoch"], row["batch"]] += row["indices"]
    return {key: sorted(batches[key]) for key in sorted(batches)}


class FailingModule(SupervisedModule):
    """Breaks on one rank at one step, in the way that ``fail["how"]`` names."""

    def __init__(self, fail: dict[str, Any], **parts: Any) -> None:
        super().__init__(**parts)
        self.fail = fail

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.fail["rank"] == self.global_rank and self.global_step == self.fail["step"]:
            self._break()
        elif self.fail["rank"] is not None and self.global_step == self.fail["step"]:
            self._busy()
        return super().training_step(batch, batch_idx)

    def _break(self) -> None:
        how = self.fail["how"]
        if how == "raise":
            raise RuntimeError("broken on purpose")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(7)
        raise AssertionError(how)

    def _busy(self) -> None:
        try:
            time.sleep(self.fail.get("busy_s", 0))
        finally:
            Path(self.fail.get("marker", os.devnull)).write_text("left in order")


class LambdaModule(SupervisedModule):
    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.activation = lambda x: x


class SleepingModule(SupervisedModule):
    """Steps that take long enough to be interrupted, in processes that say which they are."""

    def __init__(self, seconds: float = 0.1, **parts: Any) -> None:
        super().__init__(**parts)
        self.seconds = seconds

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        Path(f"started-{self.global_rank}").write_text(str(os.getpid()))
        time.sleep(self.seconds)
        return super().training_step(batch, batch_idx)


class Drawing(Dataset[tuple[Tensor, Tensor]]):
    """Random numbers of torch, NumPy and Python, drawn when a sample is read."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draws = torch.tensor([torch.rand(()).item(), numpy.random.rand(), random.random()])
        return torch.zeros(10), draws


def drawing(samples: int) -> Splits:
    return Splits(Drawing(samples))


def binary(train: int, test: int) -> Splits:
    """Labels ``(n, 1)`` in {0, 1}, sorted: ranks that see a stretch would see one class."""

    def part(samples: int, seed: int) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(samples, 10, generator=generator)
        labels = (features[:, :1] + torch.randn(samples, 1, generator=generator) > 0).float()
        order = labels.flatten().argsort(stable=True)
        return Tensors(features[order], labels[order])

    return Splits(part(train, 1), part(test, 2), part(test, 3))


class BinaryModule(SupervisedModule):
    """Metrics get probabilities and whole labels."""

    def predict_and_loss(self, batch: Any) -> tuple[Any, Tensor, int]:
        logits = self(batch[0])
        return logits.sigmoid(), self.loss(logits, batch[1]), len(batch[1])

    def _evaluate(self, batch: Any, mean: Any, metrics: Any, counts: bool) -> None:
        super()._evaluate(batch, mean, _Whole(metrics), counts)


class _Whole:
    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics

    def update(self, prediction: Tensor, target: Tensor) -> None:
        self._metrics.update(prediction.flatten(), target.flatten().long())


class DrawRecorder(Callback):
    """Write what each rank drew: in its data, and in a step, as dropout does."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        row = {
            "epoch": trainer.current_epoch,
            "batch": batch_idx,
            "data": batch[-1].tolist(),
            "step": torch.rand(()).item(),
            "weights": pl_module.network.weight.flatten()[:3].tolist(),
        }
        path = Path(self.directory) / f"drawn-{trainer.global_rank}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


class OpenFileModule(SupervisedModule):
    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.handle = sys.__stdout__


class OwnStep(SupervisedModule):
    """A step that a user wrote."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return ((self(batch[0]) - batch[1]) ** 2).mean()


class CompiledModule(SupervisedModule):
    """A network that a user has wrapped."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.network = torch.compile(self.network, backend="eager")


def without_validation(train: int, val: int, test: int) -> Splits:
    splits = indexed(train, val, test)
    return Splits(splits.train, test=splits.test)


def only_train(samples: int) -> Splits:
    return Splits(indexed(samples, 1, 1).train)


class OwnModule(LightningModule):
    """The least that a user writes: a step that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Linear(10, 1)

    def loss(self, batch: Any) -> Tensor:
        return (self.network(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class OwnManual(OwnModule):
    """Two backward passes a step, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part in (0.25, 0.75):
            self.manual_backward(part * self.loss(batch))
        optimizer.step()


class Unpicklable(Drawing):
    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.transform = lambda features: features


def unpicklable(samples: int) -> Splits:
    return Splits(Unpicklable(samples))


class Parents(Drawing):
    """Notes the command line of its loader process's parent."""

    def __init__(self, samples: int, directory: str) -> None:
        super().__init__(samples)
        self.directory = directory

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        command = " ".join(psutil.Process(os.getppid()).cmdline())
        Path(self.directory, f"parent-{os.getpid()}.txt").write_text(command)
        return super().__getitem__(index)


def parents(samples: int, directory: str) -> Splits:
    return Splits(Parents(samples, directory))
