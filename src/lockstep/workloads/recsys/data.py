"""A table of ratings as three splits by time: older ratings train, the newest test.

Each user's own newest ratings are held out, and not the newest of the whole table: of MovieLens
100k's newest tenth, 71 of 100 ratings are by users who have no older ones, so that a split at one
date would mostly ask for people of whom nothing is known. The price: what others rated later is
known in training.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lockstep.data import Splits
from lockstep.data.tensors import Tensors
from lockstep.errors import UsageError
from lockstep.workloads.recsys.table import Table, read_table

log = logging.getLogger(__name__)

Rows = NDArray[np.int64]


class Ratings(Tensors):
    """Users ``(n,)``, items ``(n,)`` and ratings ``(n,)``.

    Users and items are counted from 1 to ``users`` and ``items``; 0 is one without a training
    rating.
    """

    def __init__(self, users: Tensor, items: Tensor, ratings: Tensor, sizes: tuple[int, int]):
        super().__init__(users, items, ratings)
        self.users, self.items = sizes


class Interactions(Tensors):
    """Samples ``(user, index, seen, item)``: that ``user`` went for ``item``.

    ``index`` is the sample's place in the data set, ``seen`` a row of ``items + 1`` booleans: which
    items the user has in training. Rows are made when they are asked for, from ``items_of``: user
    u's items are ``items_of[0][items_of[1][u] : items_of[1][u + 1]]``.
    """

    def __init__(
        self,
        users: Tensor,
        items: Tensor,
        items_of: tuple[Tensor, Tensor],
        sizes: tuple[int, int],
    ) -> None:
        super().__init__(users, items)
        self.items_of = items_of
        self.users, self.items = sizes

    @override
    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        rows = torch.as_tensor(indices, dtype=torch.int64)
        users, items = (column[rows] for column in self.tensors)
        return users, rows, self.seen_by(users), items

    def seen_by(self, users: Tensor) -> Tensor:
        """Users ``(B,)`` to booleans ``(B, items + 1)``."""
        columns, starts = self.items_of
        first, counts = starts[users], starts[users + 1] - starts[users]
        row = torch.repeat_interleave(torch.arange(len(users)), counts)
        within = torch.arange(len(row)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        seen = torch.zeros(len(users), self.items + 1, dtype=torch.bool)
        seen[row, columns[first[row] + within]] = True
        return seen


def ratings(
    path: str | None = None,
    columns: Mapping[str, str] | None = None,
    held_out_share: float = 0.1,
) -> Splits:
    """Predict the rating: of each user the newest ``held_out_share`` of the ratings, at least one,
    is the test, as much before that the validation.

    Raises `UsageError` for a file that is no table of ratings, and for one that cannot be split.
    """
    table = read_table(path, columns)
    parts = split_by_time(table, held_out_share)
    users, items, sizes = renumbered(table, parts[0])
    values = torch.from_numpy(table.ratings).float()
    train, val, test = (Ratings(users[p], items[p], values[p], sizes) for p in map(_rows, parts))
    return Splits(train, val, test)


def ranking(path: str | None = None, columns: Mapping[str, str] | None = None) -> Splits:
    """Find the next item: of each user the newest rating is the test, the one before it the
    validation. That there is a rating counts, not how high it is.

    Raises as `ratings`.
    """
    table = read_table(path, columns)
    parts = split_by_time(table, 0.0)
    users, items, sizes = renumbered(table, parts[0])
    trained = _rows(parts[0])
    order = torch.argsort(users[trained], stable=True)
    counts = torch.bincount(users[trained], minlength=sizes[0] + 1)
    items_of = items[trained][order], torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    train, val, test = (
        Interactions(users[p], items[p], items_of, sizes) for p in map(_rows, parts)
    )
    return Splits(train, val, test)


def split_by_time(table: Table, held_out_share: float) -> tuple[Rows, Rows, Rows]:
    """Rows of the table for training, validation and test; of equal times, later lines are newer.

    A user with fewer than three ratings is trained on and not tested.
    """
    if not 0 <= held_out_share <= 1 / 3:
        raise UsageError(
            f"data.datasets.held_out_share must be from 0 to 1/3; got {held_out_share}. Use 0.1; "
            "0 holds out one rating of each user."
        )
    newest_first = np.lexsort((-np.arange(len(table.times)), -table.times, table.users))
    counts = np.bincount(table.users)
    starts = np.cumsum(counts) - counts
    age = np.empty(len(newest_first), dtype=np.int64)
    age[newest_first] = np.arange(len(newest_first)) - np.repeat(starts, counts)
    held = np.where(counts < 3, 0, np.maximum(1, np.floor(held_out_share * counts)))[table.users]
    test, val = np.flatnonzero(age < held), np.flatnonzero((age >= held) & (age < 2 * held))
    if not len(test):
        raise UsageError(
            "A table of ratings must hold a user with three or more: one to train on, one for "
            f"validation, one for test; got {len(table.ratings)} ratings of {len(counts)} users, "
            f"at most {counts.max()} of one. Look at data.datasets.path."
        )
    return np.flatnonzero(age >= 2 * held), val, test


def renumbered(table: Table, trained: Rows) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Users and items of all rows, ``(R,)`` each, and how many of them there are in training.

    Those of training are numbered from 1 in the order of their ids, all others are 0.
    """
    held_out = np.setdiff1d(np.arange(len(table.users)), trained)
    codes, sizes, unseen = [], [], []
    for column in (table.users, table.items):
        known = np.unique(column[trained])
        code = np.zeros(column.max() + 1, dtype=np.int64)
        code[known] = np.arange(1, len(known) + 1)
        codes.append(torch.from_numpy(code[column]))
        sizes.append(len(known))
        unseen.append(len(np.unique(column[held_out][code[column[held_out]] == 0])))
    few = int((np.bincount(table.users) < 3).sum())
    log.info(
        "%d users, %d items, %d ratings (%d older ones of the same pair left out): "
        "%d to train on, %d held out; %d users have fewer than 3 and are not tested; "
        "held out, but not in training: %d users, %d items",
        len(table.user_ids),
        len(table.item_ids),
        len(table.ratings),
        table.replaced,
        len(trained),
        len(held_out),
        few,
        *unseen,
    )
    return codes[0], codes[1], (sizes[0], sizes[1])


def _rows(part: Rows) -> Tensor:
    return torch.from_numpy(part)
