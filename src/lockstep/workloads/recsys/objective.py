"""From a batch to a loss: ratings, and rankings with drawn negatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lockstep.data import DataModule
from lockstep.errors import UsageError
from lockstep.module import Batch, SupervisedModule
from lockstep.workloads.recsys.data import Interactions, Ratings
from lockstep.workloads.recsys.negatives import drawn_items
from lockstep.workloads.recsys.network import MatrixFactorization, TwoTower


class RatingModule(SupervisedModule):
    """Predict ratings; before the first step the network's mean becomes that of training."""

    @override
    def setup(self, stage: str) -> None:
        network = self.network
        data = train_data(self, Ratings, "ratings")
        refuse_other_sizes(network, data)
        if stage == "fit" and isinstance(network, MatrixFactorization):
            network.mean.fill_(data.tensors[2].double().mean())


class RankingModule(SupervisedModule):
    """Tell the item that a user went for from ``negatives`` drawn ones; rank all in evaluation.

    The training loss is the cross-entropy of the user's item among itself and the drawn ones that
    the user does not have in training; that of validation and test is among all items.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: Callable[[Any], Optimizer],
        scheduler: Callable[[Optimizer], Any] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        negatives: int = 50,
        recommended: int = 10,
    ) -> None:
        super().__init__(network, cross_entropy, optimizer, scheduler, metrics)
        for name, value in (("negatives", negatives), ("recommended", recommended)):
            if value < 1:
                raise UsageError(f"model.{name} must be 1 or greater; got {value}.")
        self.negatives, self.recommended = negatives, recommended
        self._seed = 0

    @override
    def setup(self, stage: str) -> None:
        data = train_data(self, Interactions, "ranking")
        refuse_other_sizes(self.network, data)
        self._items = data.items
        self._seed = self.trainer.datamodule.seed

    @override
    def predict_and_loss(self, batch: Batch) -> tuple[Any, Tensor, int]:
        users, index, seen, item = batch
        if not self.training:
            scores = self._scores(users, seen)
            return scores, cross_entropy(scores, item), len(item)
        drawn = drawn_items(index, self.negatives, self._items, self._seed, self.current_epoch)
        scores = self(users, torch.cat([item[:, None], drawn], dim=1))
        known = torch.nn.functional.pad(seen.gather(1, drawn), (1, 0))
        loss = cross_entropy(scores.masked_fill(known, -torch.inf), torch.zeros_like(item))
        return None, loss, len(item)

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The best items of each user and their scores, ``(B, recommended)``, best first."""
        users, _, seen, _ = batch
        scores = self._scores(users, seen)
        scores[:, 0] = -torch.inf
        best = scores.topk(min(self.recommended, self._items), dim=1)
        return {"items": best.indices, "scores": best.values}

    def _scores(self, users: Tensor, seen: Tensor) -> Tensor:
        scores: Tensor = self(users)
        return scores.masked_fill(seen, -torch.inf)


def train_data(module: SupervisedModule, kind: type[Any], function: str) -> Any:
    data = getattr(module.trainer, "datamodule", None)
    train = data.splits.train if isinstance(data, DataModule) else data
    if not isinstance(train, kind):
        raise UsageError(
            f"{type(module).__name__} trains on what lockstep.workloads.recsys.data.{function} "
            f"returns; got {type(train).__name__}. Use data=movielens_{function}."
        )
    return train


def refuse_other_sizes(network: nn.Module, data: Ratings | Interactions) -> None:
    """A table has a row for each user or item of training: no id without, no row too many."""
    wrong = {
        name: (size, getattr(network, name))
        for name, size in (("users", data.users), ("items", data.items))
        if getattr(network, name) != size
    }
    if wrong:
        got = ", ".join(f"model.network.{name}={value}" for name, (_, value) in wrong.items())
        use = " ".join(f"model.network.{name}={size}" for name, (size, _) in wrong.items())
        raise UsageError(
            f"The network must have as many users and items as there are in training; got {got}. "
            f"Use {use}."
        )
