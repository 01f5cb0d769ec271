"""Recommendation: the table, the split by time, drawn negatives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_recsys import USERS, small

from lockstep.errors import UsageError
from lockstep.workloads.recsys.data import ranking, ratings, split_by_time
from lockstep.workloads.recsys.negatives import drawn_items
from lockstep.workloads.recsys.table import read_table

__all__ = ["small"]  # a fixture


# The table


@pytest.fixture
def csv(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "ratings.csv"
        path.write_text(text)
        return str(path)

    return write


def test_columns_are_found_by_name_and_ids_may_be_text(csv: Callable[[str], str]) -> None:
    table = read_table(csv('when,who,what,stars\n3,ann,"a, b",4.5\n1,7,c,2\n'), OTHER_NAMES)
    assert (table.user_ids, table.item_ids) == (["7", "ann"], ["a, b", "c"])
    assert table.users.tolist() == [1, 0]
    assert table.items.tolist() == [0, 1]
    assert table.ratings.tolist() == [4.5, 2]
    assert table.times.tolist() == [3, 1]


OTHER_NAMES = {"user": "who", "item": "what", "rating": "stars", "time": "when"}


def test_of_a_pair_rated_twice_the_newest_counts(csv: Callable[[str], str]) -> None:
    rows = ["a,x,1,9", "a,x,2,5", "a,y,3,1", "b,x,4,7", "b,x,5,7"]
    table = read_table(csv("\n".join(["user,item,rating,time", *rows])))
    assert table.ratings.tolist() == [1, 3, 5]  # of equal times the later line
    assert table.replaced == 2


HEAD = "user,item,rating,time\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must have one column user; there are: none"),
        ("user,film,rating,time\na,x,1,2\n", "one column item; there are: user, film, rating"),
        ("user,user,item,rating,time\n", "one column user; there are: user, user"),
        (HEAD, "must hold ratings"),
        (HEAD + "a,x,1,2\na,y,1\n", "line 3: a line must have 4 fields.*got 3. Is the file torn"),
        (HEAD + "a,x,1,2\n\na,y,1,3\n", "line 3: a line must have 4 fields.*got 0"),
        (HEAD + "a,x,good,2\n", "line 2: rating must be a number; got 'good'"),
        (HEAD + "a,x,1,2\na,y,nan,2\n", "line 3: rating must be a number; got 'nan'"),
        (HEAD + "a,x,,2\n", "line 2: rating must be a number; got ''"),
        (HEAD + "a,x,inf,2\n", "line 2: rating must be a number; got 'inf'"),
        (HEAD + "a,x,1,-2\n", "line 2: time must be a number, 0 or greater; got '-2'"),
        (HEAD + "a,x,1,2020-01-01\n", "line 2: time must be a number.*got '2020-01-01'"),
        (HEAD + ",x,1,2\n", "line 2: user and item must not be empty; got '' and 'x'"),
        (HEAD + 'a,x,1,2\nb,"x,1,2\n', "must be a CSV file; unexpected end of data"),
        (HEAD + "a,x,1,2\na,y,1,3\n", "a user with three or more.*got 2 ratings of 1 users"),
    ],
)
def test_what_is_no_table_is_refused_with_its_line(
    csv: Callable[[str], str], text: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        ratings(csv(text))


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"user, item, rating, time; it cannot be read: No such"):
        ratings(str(tmp_path / "none.csv"))
    with pytest.raises(UsageError, match=r"it cannot be read: Is a directory.*datasets\.path"):
        ratings(str(tmp_path))
    (tmp_path / "zip").write_bytes(b"\x1f\x8b\x08\xff\xfe")
    with pytest.raises(UsageError, match=r"must be UTF-8 text.*Is it compressed"):
        ratings(str(tmp_path / "zip"))
    with pytest.raises(UsageError, match=r"columns must name user, item.*got \['film'\]"):
        ratings(str(tmp_path / "zip"), {"film": "x"})


def test_without_recbole_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import PackageNotFoundError

    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("lockstep.workloads.recsys.table.distribution", missing)
    with pytest.raises(UsageError, match=r"pip install --no-deps recbole==1\.2\.1.*path="):
        ratings()


# The split


def test_each_users_newest_ratings_are_held_out(small: str) -> None:
    table = read_table(small)
    for share in (0.0, 0.2):
        parts = split_by_time(table, share)
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(table.times)))
        for user in range(USERS):
            train, val, test = (table.times[p[table.users[p] == user]] for p in parts)
            assert train.max() < val.min()
            assert val.max() < test.min()
            count = len(train) + len(val) + len(test)
            assert len(val) == len(test) == max(1, int(share * count))


def test_of_equal_times_the_later_line_is_newer_and_few_ratings_are_trained_on(
    csv: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = csv(HEAD + "a,x,1,5\na,y,2,5\nb,x,3,5\na,z,4,5\nb,y,5,6\nb,y,6,7\n")
    splits: Any = ratings(path)
    assert splits.train.tensors[2].tolist() == [1, 3, 6]
    assert splits.val.tensors[2].tolist() == [2]
    assert splits.test.tensors[2].tolist() == [4]
    assert splits.test.tensors[1].tolist() == [0], "z is in no training rating"
    assert (splits.train.users, splits.train.items) == (2, 2)
    assert caplog.messages == [
        "2 users, 3 items, 5 ratings (1 older ones of the same pair left out): 3 to train on, 2 "
        "held out; 1 users have fewer than 3 and are not tested; held out, but not in training: "
        "0 users, 1 items"
    ]


def test_a_share_that_leaves_nothing_to_train_on_is_refused(small: str) -> None:
    with pytest.raises(UsageError, match=r"held_out_share must be from 0 to 1/3; got 0\.5"):
        ratings(small, held_out_share=0.5)


def test_what_a_user_has_seen_is_that_users_training_items(small: str) -> None:
    splits: Any = ranking(small)
    users, _, seen, items = splits.test.__getitems__(range(USERS))
    trained = list(zip(*(column.tolist() for column in splits.train.tensors), strict=True))
    for user, row, item in zip(users.tolist(), seen, items.tolist(), strict=True):
        assert row.nonzero().flatten().tolist() == sorted(i for u, i in trained if u == user)
        assert not row[item]
    one = splits.test[5]
    assert all(torch.equal(a, b[5]) for a, b in zip(one, (users, _, seen, items), strict=True))


# Negatives


def test_negatives_depend_on_seed_epoch_and_index_alone() -> None:
    index = torch.arange(1000)
    drawn = drawn_items(index, 20, 50, seed=3, epoch=2)
    shuffled = torch.randperm(1000)
    assert torch.equal(drawn_items(shuffled, 20, 50, 3, 2), drawn[shuffled])
    for rank in range(3):
        assert torch.equal(drawn_items(index[rank::3], 20, 50, 3, 2), drawn[rank::3])
    for other in (drawn_items(index, 20, 50, 3, 3), drawn_items(index, 20, 50, 4, 2)):
        assert (other == drawn).float().mean() < 0.04  # by chance 0.02
    assert (drawn[1:] == drawn[:-1]).float().mean() < 0.04
    # Neither does one epoch repeat another's draws at other samples, nor one sample another's.
    assert len({tuple(row) for row in drawn.tolist()}) == 1000


def test_negatives_are_uniform() -> None:
    counts = torch.bincount(drawn_items(torch.arange(5000), 20, 50, 0, 0).flatten())
    assert counts[0] == 0
    expected = 100_000 / 50
    chi_squared = ((counts[1:] - expected) ** 2 / expected).sum()
    assert 20 < chi_squared < 90  # 49 degrees of freedom: 4 standard deviations


@pytest.mark.parametrize("seed", [0, 2**31, 2**63 - 1])
def test_negatives_take_any_seed(seed: int) -> None:
    drawn = drawn_items(torch.arange(9), 4, 7, seed, 10**6)
    assert drawn.min() >= 1
    assert drawn.max() <= 7
