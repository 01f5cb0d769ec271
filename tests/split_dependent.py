"""Models and data whose result depends on how a batch is split, each for one reason."""

from __future__ import annotations

import struct
from os import urandom
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lockstep.data import Splits
from lockstep.data.synthetic import teacher_regression
from lockstep.module import SupervisedModule


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise that is drawn when they are read: from torch's generator, or from none."""

    def __init__(self, samples: int, seeded: bool) -> None:
        self.clean = teacher_regression(samples, 0, 0).train
        self.samples, self.seeded = samples, seeded

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.clean[index]
        noise = torch.rand(()).item() if self.seeded else struct.unpack("I", urandom(4))[0] / 2**32
        return inputs + noise, target


def noisy(samples: int, seeded: bool) -> Splits:
    return Splits(Noisy(samples, seeded), test=teacher_regression(samples, 0, 0).train)


class WorstOfRank(SupervisedModule):
    """Logs the largest error of each batch, averaged over batches and ranks."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        super().test_step(batch, batch_idx)
        worst = (self(batch[0]) - batch[1]).abs().max()
        self.log("test/worst", worst, sync_dist=True, batch_size=len(batch[1]))


class OwnLoaders(LightningDataModule):
    """Shuffles by itself, and so by Lightning's sampler under ddp."""

    def __init__(self, samples: int, batch_size: int) -> None:
        super().__init__()
        self.samples, self.batch_size = samples, batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        train = TensorDataset(*teacher_regression(self.samples, 0, 0).train[:])
        return DataLoader(train, batch_size=self.batch_size, shuffle=True)
