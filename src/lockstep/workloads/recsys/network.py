"""Two networks over tables of users and items, whose row 0 is one without a training rating."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from typing_extensions import override

# B batch, K candidates for each sample, D width, I items


def embedding_table(rows: int, width: int, std: float, sparse: bool) -> nn.Embedding:
    """Rows 1 to ``rows``, normally distributed, and row 0, which is zero and stays so."""
    made = nn.Embedding(rows + 1, width, padding_idx=0, sparse=sparse)
    nn.init.normal_(made.weight[1:], std=std)
    return made


class MatrixFactorization(nn.Module):
    """``mean + b_u + b_i + p_u . q_i`` (Koren, Bell and Volinsky 2009, IEEE Computer 42(8)).

    Maps users ``(B,)`` and items ``(B,)`` to ratings ``(B,)``. Of a user or item that is not in
    training, the mean and the other's bias remain. ``mean`` is set from the training ratings.
    """

    mean: Tensor

    def __init__(
        self, users: int, items: int, factors: int = 32, std: float = 0.05, sparse: bool = False
    ) -> None:
        super().__init__()
        self.users, self.items, self.sparse = users, items, sparse
        self.user_factors = embedding_table(users, factors, std, sparse)
        self.item_factors = embedding_table(items, factors, std, sparse)
        self.user_bias = embedding_table(users, 1, 0.0, sparse)
        self.item_bias = embedding_table(items, 1, 0.0, sparse)
        self.register_buffer("mean", torch.zeros(()))

    @override
    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        fit = (self.user_factors(users) * self.item_factors(items)).sum(-1)
        bias = self.user_bias(users) + self.item_bias(items)
        rating: Tensor = self.mean + bias.squeeze(-1) + fit
        return rating


class Tower(nn.Module):
    """An embedding plus what a hidden layer makes of it: ids ``(...)`` to vectors ``(..., D)``."""

    def __init__(self, rows: int, width: int, std: float, sparse: bool, bias: bool) -> None:
        super().__init__()
        self.table = embedding_table(rows, width, std, sparse)
        self.layers = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width, bias)
        )

    @override
    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        vectors: Tensor = rows + self.layers(rows)
        return vectors


class TwoTower(nn.Module):
    """The score of an item for a user is the product of what their towers make of them.

    Maps users ``(B,)`` and items ``(B, K)`` to scores ``(B, K)``; users alone to those of all
    items, ``(B, I + 1)``.
    """

    def __init__(
        self, users: int, items: int, width: int = 64, std: float = 0.1, sparse: bool = False
    ) -> None:
        super().__init__()
        self.users, self.items, self.sparse = users, items, sparse
        self.user_tower = Tower(users, width, std, sparse, bias=True)
        # What all items share moves all scores of a user alike, which a softmax does not see: the
        # gradient of such a bias is rounding, and Adam would make steps of full size out of it.
        self.item_tower = Tower(items, width, std, sparse, bias=False)

    @override
    def forward(self, users: Tensor, items: Tensor | None = None) -> Tensor:
        of_users = self.user_tower(users)
        if items is None:
            everything = torch.arange(self.items + 1, device=users.device)
            scores: Tensor = of_users @ self.item_tower(everything).T
            return scores
        # Each item passes its tower once, however many samples drew it: five times as fast here.
        distinct, place = torch.unique(items, return_inverse=True)
        return torch.einsum("bd,bkd->bk", of_users, embedding(place, self.item_tower(distinct)))
