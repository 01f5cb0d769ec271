"""Recommendation: table, split by time, drawn negatives, exact rankings, sparse gradients."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import DDP2, Launch, on
from left import column, weights

from lockstep.errors import UsageError
from lockstep.workloads.recsys.data import ranking, ratings, split_by_time
from lockstep.workloads.recsys.negatives import drawn_items
from lockstep.workloads.recsys.network import MatrixFactorization, TwoTower
from lockstep.workloads.recsys.objective import RankingModule
from lockstep.workloads.recsys.ranking import NDCG, HitRate, places
from lockstep.workloads.recsys.sparse import refuse_sparse
from lockstep.workloads.recsys.table import read_table

MOVIELENS = pytest.mark.skipif(
    find_spec("recbole") is None,
    reason="needs MovieLens 100k: pip install --no-deps recbole==1.2.1",
)
USERS, ITEMS = 31, 40
PLACES = [("dp", 2), ("ddp", 2), ("ddp_spawn", 2)]


@pytest.fixture
def csv(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "ratings.csv"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """31 users rate 4 to 19 of 40 items, low numbers more often; item x0 once, as the newest."""
    rng = np.random.default_rng(0)
    lines = ["time,rating,note,item,user"]
    for user in range(USERS):
        weights = 1 / np.arange(1, ITEMS)
        items = rng.choice(ITEMS - 1, 4 + user % 16, replace=False, p=weights / weights.sum()) + 1
        for time, item in enumerate(items):
            lines.append(f"{time},{1 + (user + item) % 5},-,x{item},u{user}")
    lines.append("99,5,-,x0,u3")
    path = tmp_path_factory.mktemp("recsys") / "small.csv"
    path.write_text("\n".join(lines))
    return str(path)


def overrides(experiment: str, path: str) -> list[str]:
    splits = {"ratings": ratings, "two_tower": ranking}[experiment](path)
    train: Any = splits.train
    return [
        f"experiment=recsys/{experiment}",
        f"data.datasets.path={path}",
        f"model.network.users={train.users}",
        f"model.network.items={train.items}",
        "data.global_batch_size=60",
        "trainer.max_epochs=2",
    ]


# The table


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


# Rankings


def test_places_count_ties_against_the_item_and_an_unseen_item_as_last() -> None:
    no = -torch.inf
    scores = torch.tensor([[9.0, 3, 1, 2], [9, 1, 1, no], [9, no, no, 0], [9, 1, 2, 3]])
    assert places(scores, torch.tensor([3, 1, 3, 0])).tolist() == [2, 2, 1, 4]


def test_ranking_metrics_equal_sums_by_hand_also_after_a_batch_without_hits() -> None:
    from torchmetrics import MetricCollection

    metrics = MetricCollection({"hit_rate": HitRate(2), "ndcg": NDCG(2)})
    scores = torch.tensor([[0.0, 1, 2, 3]])
    for target in (1, 1, 3, 2):  # places 3, 3, 1, 2
        metrics.update(scores, torch.tensor([target]))
    values = metrics.compute()
    assert values["hit_rate"].item() == pytest.approx(2 / 4)
    assert values["ndcg"].item() == pytest.approx((1 + 1 / np.log2(3)) / 4)


def popularity(splits: Any, k: int = 10) -> tuple[float, float]:
    """Hit rate and NDCG at k of "what most people went for", in plain numpy."""
    users, items = (column.numpy() for column in splits.train.tensors)
    count = np.bincount(items, minlength=splits.train.items + 1).astype(float)
    place = []
    for user, item in zip(*(ids.numpy() for ids in splits.test.tensors), strict=True):
        candidates = np.setdiff1d(np.arange(1, len(count)), items[users == user])
        better = (count[candidates] >= count[item]).sum() if item else np.inf
        place.append(better)
    ranks = np.array(place)
    return float((ranks <= k).mean()), float(np.where(ranks <= k, 1 / np.log2(1 + ranks), 0).mean())


def test_metrics_of_constant_scores_by_popularity_are_those_of_numpy(small: str) -> None:
    splits: Any = ranking(small)
    _, _, seen, target = splits.test.__getitems__(range(USERS))
    count = torch.bincount(splits.train.tensors[1], minlength=splits.train.items + 1).float()
    scores = count.expand(USERS, -1).masked_fill(seen, -torch.inf)
    hit_rate, ndcg = HitRate(), NDCG()
    hit_rate.update(scores, target)
    ndcg.update(scores, target)
    assert (target == 0).any(), "an item that is not in training is among the held out"
    assert (hit_rate.compute().item(), ndcg.compute().item()) == pytest.approx(popularity(splits))


# Networks


def test_what_is_not_in_training_is_rated_by_the_mean_and_the_others_bias() -> None:
    network = MatrixFactorization(4, 5)
    torch.nn.init.normal_(network.item_bias.weight[1:])
    network.mean.fill_(3.5)
    users, items = torch.tensor([0, 2]), torch.tensor([3, 0])
    expected = [3.5 + network.item_bias.weight[3].item(), 3.5]
    assert network(users, items).tolist() == pytest.approx(expected)


def test_scores_of_candidates_are_those_among_all_items() -> None:
    network = TwoTower(6, 9)
    users, items = torch.tensor([1, 6, 2]), torch.tensor([[1, 9, 1], [2, 2, 3], [4, 1, 0]])
    torch.testing.assert_close(network(users, items), network(users).gather(1, items))


def test_the_training_loss_leaves_out_drawn_items_that_the_user_has(small: str) -> None:
    splits: Any = ranking(small)
    network = TwoTower(splits.train.users, splits.train.items)
    module = RankingModule(network, torch.optim.SGD, negatives=30)
    module._items, module._seed = splits.train.items, 5
    batch = splits.train.__getitems__([0, 17, 40, 100])
    _, loss, samples = module.predict_and_loss(batch)
    by_hand = []
    for user, index, seen, item in zip(*batch, strict=True):
        drawn = drawn_items(index[None], 30, splits.train.items, 5, 0)[0].tolist()
        others = [other for other in drawn if not seen[other]]
        assert 0 < len(others) < 30
        scores = network(user[None])[0, [int(item), *others]]
        by_hand.append(scores.logsumexp(0) - scores[0])
    assert samples == 4
    torch.testing.assert_close(loss, torch.stack(by_hand).mean())


def test_no_weight_has_a_gradient_that_is_only_rounding() -> None:
    torch.manual_seed(0)
    network = TwoTower(6, 9).double()
    scores = network(torch.arange(1, 7), torch.randint(1, 10, (6, 4)))
    torch.nn.functional.cross_entropy(scores, torch.zeros(6, dtype=torch.int64)).backward()
    for name, weight in network.named_parameters():
        assert weight.grad is not None
        assert weight.grad.abs().max() > 1e-9, name


# Runs


@pytest.mark.processes
@pytest.mark.parametrize(
    ("experiment", "optimizer"),
    [("ratings", "SparseAdam"), ("two_tower", "Adagrad")],
)
def test_sparse_gradients_train_to_the_weights_of_dense_ones(
    launch: Launch, small: str, experiment: str, optimizer: str
) -> None:
    # SparseAdam has no dense counterpart: Adam moves rows on that are not in a batch. 1e-7, as
    # Adagrad's first step divides a gradient by its own size, and rounding with it.
    run = [
        *overrides(experiment, small),
        "trainer.precision=64-true",
        "optimizer.lr=0.05",
        "trainer.gradient_clip_val=0.5",
    ]
    run += ["~optimizer.weight_decay"] if experiment == "ratings" else []
    sparse = [*run, f"optimizer._target_=torch.optim.{optimizer}", "model.network.sparse=true"]
    one = weights(launch(*sparse)["directory"])
    if optimizer == "Adagrad":
        dense = launch(*sparse, "model.network.sparse=false")
        torch.testing.assert_close(one, weights(dense["directory"]), rtol=1e-7, atol=1e-7)
    for strategy, devices in (("dp", 2), ("ddp", 2)):
        where = on(strategy, devices)
        spread = weights(launch(*sparse, *where)["directory"])
        torch.testing.assert_close(spread, one, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("experiment", "changes", "words"),
    [
        ("ratings", [], r"needs an optimizer that takes sparse gradients.*got Adam\."),
        (
            "ratings",
            ["optimizer._target_=torch.optim.Adagrad"],
            r"takes no weight decay.*optimizer\.weight_decay=0\.0003",
        ),
        (
            "two_tower",
            ["optimizer._target_=torch.optim.SparseAdam"],
            "SparseAdam takes no dense gradients, and TwoTower has dense layers",
        ),
        (
            "two_tower",
            [
                "optimizer._target_=torch.optim.Adagrad",
                "trainer.gradient_clip_val=1",
                "trainer.gradient_clip_algorithm=value",
            ],
            r"cannot be clipped by value.*algorithm=norm",
        ),
    ],
)
def test_sparse_gradients_are_refused_where_they_cannot_work(
    launch: Launch, small: str, experiment: str, changes: list[str], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        launch(*overrides(experiment, small), "model.network.sparse=true", *changes)


def test_sparse_gradients_on_several_gpus_are_refused() -> None:
    network = MatrixFactorization(3, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(list(network.parameters()))
    trainer: Any = SimpleNamespace(
        gradient_clip_val=None,
        strategy=SimpleNamespace(root_device=torch.device("cuda")),
        num_devices=2,
        num_nodes=1,
    )
    with pytest.raises(
        UsageError, match=r"got 2 devices of type cuda\. Use model\.network\.sparse"
    ):
        refuse_sparse(network, optimizer, trainer)


def test_tables_of_another_size_are_refused_with_the_right_one(launch: Launch, small: str) -> None:
    wrong = [*overrides("ratings", small), "model.network.users=30", "model.network.items=99"]
    with pytest.raises(UsageError, match=r"users=30.*items=99\. Use .*users=31 .*items=\d\d\.$"):
        launch(*wrong)


def test_data_of_the_other_kind_is_refused(launch: Launch, small: str) -> None:
    mixed = [*overrides("ratings", small), "data=movielens_ranking", f"data.datasets.path={small}"]
    with pytest.raises(UsageError, match=r"RatingModule.*Use data=movielens_ratings"):
        launch(*mixed)


@pytest.mark.processes
def test_predictions_are_each_users_best_unseen_items(launch: Launch, small: str) -> None:
    run = [*overrides("two_tower", small), "predict=true", "model.recommended=5"]
    run += ["trainer.precision=64-true"]  # the ranks' rounding shall not swap two items
    first = torch.load(launch(*run)["predictions"], weights_only=True)
    assert first["items"].shape == (USERS, 5)
    splits: Any = ranking(small)
    seen = splits.test.__getitems__(range(USERS))[2]
    assert not seen.gather(1, first["items"]).any()
    assert first["items"].min() >= 1
    assert (first["scores"].diff(dim=1) <= 0).all()
    where = DDP2
    second = torch.load(launch(*run, *where)["predictions"], weights_only=True)
    assert torch.equal(first["items"], second["items"])


# MovieLens 100k, to the scores that the experiments state


@MOVIELENS
@pytest.mark.slow
@pytest.mark.processes
def test_matrix_factorisation_beats_the_mean_as_stated(launch: Launch) -> None:
    splits: Any = ratings()
    train, test = (part.tensors[2].double().numpy() for part in (splits.train, splits.test))
    mean = float(np.sqrt(np.mean((test - train.mean()) ** 2)))
    assert mean == pytest.approx(1.240, abs=1e-3)
    single = launch("experiment=recsys/ratings")
    assert single["metrics"]["test/rmse"] == pytest.approx(0.997, abs=0.005)
    # 1e-4: Adam carries the last digits of float32 through 1,185 steps.
    for strategy, devices in PLACES:
        where = on(strategy, devices)
        spread = launch("experiment=recsys/ratings", *where)
        curve = column(single["directory"], "train/loss")
        assert column(spread["directory"], "train/loss") == pytest.approx(curve, rel=1e-4), strategy
        for name, value in single["metrics"].items():
            assert spread["metrics"][name] == pytest.approx(value, rel=1e-4), (strategy, name)


@MOVIELENS
@pytest.mark.slow
@pytest.mark.processes
def test_two_towers_beat_popularity_as_stated(launch: Launch) -> None:
    hit_rate, ndcg = popularity(ranking())
    assert (hit_rate, ndcg) == pytest.approx((0.0817, 0.0425), abs=1e-4)
    metrics = launch("experiment=recsys/two_tower")["metrics"]
    assert metrics["test/hit_rate_10"] == pytest.approx(0.13, abs=0.015)
    assert metrics["test/ndcg_10"] == pytest.approx(0.065, abs=0.008)
    assert metrics["test/hit_rate_10"] > 1.3 * hit_rate
    assert metrics["test/ndcg_10"] > 1.3 * ndcg


@MOVIELENS
@pytest.mark.slow
@pytest.mark.processes
def test_two_towers_on_movielens_are_the_same_everywhere(launch: Launch) -> None:
    # In float64: in float32 Adam carries rounding into the third digit of NDCG within some epochs.
    run = ["experiment=recsys/two_tower", "trainer.max_epochs=1", "trainer.precision=64-true"]
    run += ["trainer.limit_train_batches=30", "data.global_batch_size=1020"]
    single = launch(*run)
    assert single["samples_seen"]["test"] == 943
    for strategy, devices in (*PLACES, ("ddp", 3)):
        where = on(strategy, devices)
        spread = launch(*run, *where)["metrics"]
        for name, value in single["metrics"].items():
            assert spread[name] == pytest.approx(value, rel=1e-5), (strategy, name)
