"""From a batch to a loss: ratings, and rankings with drawn negatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lockstep.data import DataModule
from lockstep.errors import UsageError
from lockstep.module import Batch, SupervisedModule
from lockstep.workloads.recsys.data import Interactions, Ratings
from lockstep.workloads.recsys.negatives import drawn_items
from lockstep.workloads.recsys.network import MatrixFactorization
from lockstep.workloads.recsys.sparse import refuse_sparse


class Recommender(SupervisedModule):
    """Checks, before the first step, that tables, data and optimizer fit each other."""

    data: type[Ratings] | type[Interactions]
    function: str

    @override
    def setup(self, stage: str) -> None:
        self._items = self.train_data().items
        refuse_other_sizes(self.network, self.train_data())

    @override
    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        if getattr(self.network, "sparse", False):
            optimizer = made["optimizer"] if isinstance(made, dict) else made
            refuse_sparse(self.network, optimizer, self.trainer)
        return made

    def train_data(self) -> Any:
        """The training split, of the type that the module was made for."""
        data: Any = getattr(self.trainer, "datamodule", None)
        train = data.splits.train if isinstance(data, DataModule) else data
        if not isinstance(train, self.data):
            raise UsageError(
                f"{type(self).__name__} trains on what lockstep.workloads.recsys.data."
                f"{self.function} returns; got {type(train).__name__}. "
                f"Use data=movielens_{self.function}."
            )
        return train


class RatingModule(Recommender):
    """Predict ratings; before the first step the network's mean becomes that of training."""

    data, function = Ratings, "ratings"

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and isinstance(self.network, MatrixFactorization):
            self.network.mean.fill_(self.train_data().tensors[2].double().mean())


class RankingModule(Recommender):
    """Tell the item that a user went for from ``negatives`` drawn ones; rank all in evaluation.

    The training loss is the cross-entropy of the user's item among itself and the drawn ones that
    the user does not have in training; that of validation and test is among all items.
    """

    data, function = Interactions, "ranking"

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
        super().setup(stage)
        trainer: Any = self.trainer
        self._seed = trainer.datamodule.seed

    @override
    def predict_and_loss(self, batch: Batch) -> tuple[Any, Tensor, int]:
        users, index, seen, item = batch
        if not self.training:
            scores = self._scores(users, seen)
            return scores, cross_entropy(scores, item), len(item)
        drawn = drawn_items(index, self.negatives, self._items, self._seed, self.current_epoch)
        scores = self(users, torch.cat([item[:, None], drawn], dim=1))
        known = pad(seen.gather(1, drawn), (1, 0))
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


def refuse_other_sizes(network: nn.Module, data: Ratings | Interactions) -> None:
    """A table has a row for each user or item of training: no id without, no row too many."""
    wrong = {
        name: (size, getattr(network, name, size))
        for name, size in (("users", data.users), ("items", data.items))
        if getattr(network, name, size) != size
    }
    if wrong:
        got = ", ".join(f"model.network.{name}={value}" for name, (_, value) in wrong.items())
        use = " ".join(f"model.network.{name}={size}" for name, (size, _) in wrong.items())
        raise UsageError(
            f"The network must have as many users and items as there are in training; got {got}. "
            f"Use {use}."
        )
