"""dp on CPU devices: a module for it, plain training to compare with, a network divided by hand."""

import dataclasses
from collections import namedtuple
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from lockstep.strategies import replicas as dp
from lockstep.strategies import scatter_gather

WARNINGS = [
    "error",
    "ignore:.*does not have many workers",
    "ignore:GPU available but not used",
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # torch.compile looks at it
    r"ignore:.*isinstance\(treespec, LeafSpec\)",  # Lightning 2.6 on torch 2.14
]
CPU = torch.device("cpu")
Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Tensor
    tag: str


class Module(pl.LightningModule):
    """A regression whose step calls ``self(x)``; tests override what they need."""

    def __init__(self, network: nn.Module | None = None) -> None:
        super().__init__()
        self.network = network or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        return self.network(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = mse_loss(self(x), y)
        self.losses.append(loss.detach().cpu())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader(samples: int = 17, batch_size: int = 7) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 4, generator=generator)
    y = torch.randn(samples, 2, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def trainer(strategy: str = "dp", devices: Any = 2, accelerator: str = "cpu", **kwargs: Any):
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        strategy=strategy, devices=devices, accelerator=accelerator, **options | kwargs
    )


def fit(cls: Any = Module, strategy: str = "dp", devices: Any = 2, data: Any = None, **kwargs: Any):
    """A module trained from seed 0, moved to CPU by the teardown."""
    torch.manual_seed(0)
    module = cls()
    trainer(strategy, devices, **kwargs).fit(module, data or loader())
    return module


def single(cls: Any = Module, data: Any = None, **kwargs: Any):
    return fit(cls, "auto", 1, data, **kwargs)


def assert_same_training(one: Module, other: Module, **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(torch.stack(one.losses), torch.stack(other.losses), **tolerance)
    torch.testing.assert_close(one.state_dict(), other.state_dict(), **tolerance)


def divide(module: nn.Module, *args: Any, devices: int = 2, **kwargs: Any) -> Any:
    """The strategy's four steps on a bare module."""
    sizes = scatter_gather.chunk_sizes({"args": args, "kwargs": kwargs}, devices)
    used = [CPU] * max(1, len(sizes))
    replicas = dp.Replicas(used)
    try:
        chunks = scatter_gather.split((args, kwargs), sizes, used)
        return scatter_gather.merge(replicas.run(dp.replicate(module, used), chunks), sizes, CPU)
    finally:
        replicas.close()


class Call(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)
