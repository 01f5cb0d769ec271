"""Order and shares: pure functions, no processes."""

from __future__ import annotations

import pytest
import torch

from lockstep.config import DataConfig
from lockstep.data.sharding import EvalShards, TrainShards, epoch_order, share_of
from lockstep.data.tensors import Tensors
from lockstep.errors import UsageError
from lockstep.sizes import batch_sizes


def shards(samples: int, batch: int, world: int, **options: object) -> list[TrainShards]:
    data = Tensors(torch.zeros(samples, 1))
    return [
        TrainShards(data, global_batch_size=batch, rank=r, world_size=world, seed=3, **options)
        for r in range(world)
    ]


def batches(samplers: list[TrainShards], per_process: int) -> list[list[list[int]]]:
    """batch -> rank -> indices, cut as a DataLoader cuts them."""
    orders = [list(sampler) for sampler in samplers]
    steps = {-(-len(order) // per_process) for order in orders}
    assert len(steps) == 1, f"ranks make different numbers of steps: {steps}"
    return [
        [order[k * per_process : (k + 1) * per_process] for order in orders]
        for k in range(steps.pop())
    ]


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 64, 66, 67, 71])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_global_batches_are_the_same_sets_for_every_world_size(samples: int, world: int) -> None:
    single = batches(shards(samples, 12, 1), min(12, samples))
    ranks = shards(samples, 12, world)
    spread = batches(ranks, -(-ranks[0].global_batch_size // world))
    assert len(spread) == len(single)
    for step, (whole, parts) in enumerate(zip(single, spread, strict=True)):
        weighted = [
            index
            for rank, part in enumerate(parts)
            for index in (part if ranks[rank].weight(step) else [])
        ]
        assert sorted(weighted) == sorted(whole[0])


@pytest.mark.parametrize("samples", [1, 5, 64, 67])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_weighted_means_of_ranks_average_to_the_mean_of_the_batch(samples: int, world: int) -> None:
    values = torch.arange(samples, dtype=torch.float64) ** 2
    ranks = shards(samples, 12, world)
    for step, parts in enumerate(batches(ranks, -(-ranks[0].global_batch_size // world))):
        weights = [ranks[rank].weight(step) for rank in range(world)]
        means = [values[part].mean() * weight for part, weight in zip(parts, weights, strict=True)]
        seen = [i for part, weight in zip(parts, weights, strict=True) if weight for i in part]
        assert sum(means) / world == pytest.approx(values[seen].mean().item(), rel=1e-12)


def test_len_is_the_number_of_indices_with_and_without_drop_last() -> None:
    for drop_last in (True, False):
        for samples in (3, 25, 26, 36):
            for sampler in shards(samples, 12, 4, drop_last=drop_last):
                assert len(list(sampler)) == len(sampler)


def test_drop_last_leaves_out_only_a_batch_that_is_not_full() -> None:
    assert shards(25, 12, 1, drop_last=True)[0].steps == 2
    assert shards(24, 12, 1, drop_last=True)[0].steps == 2
    assert shards(5, 12, 1, drop_last=True)[0].steps == 1


def test_order_depends_on_seed_and_epoch_and_nothing_else() -> None:
    orders = {(s, e): tuple(epoch_order(50, s, e, True).tolist()) for s in (0, 1) for e in (0, 1)}
    assert len(set(orders.values())) == 4
    assert orders[0, 1] == tuple(epoch_order(50, 0, 1, True).tolist())


def test_shuffle_false_keeps_data_set_order() -> None:
    first, second = shards(8, 4, 2, shuffle=False)
    assert list(first) == [0, 2, 4, 6]
    assert list(second) == [1, 3, 5, 7]


@pytest.mark.parametrize("samples", [1, 2, 3, 33, 1001])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_evaluation_sees_each_sample_once(samples: int, world: int) -> None:
    data = Tensors(torch.zeros(samples, 1))
    ranks = [EvalShards(data, rank=rank, world_size=world) for rank in range(world)]
    counted = [index for rank in ranks if not rank.only_filler for index in rank]
    assert sorted(counted) == list(range(samples))
    assert all(len(rank) >= 1 for rank in ranks), "no rank may leave out the evaluation"
    assert [len(rank) for rank in ranks] == [len(list(rank)) for rank in ranks]


def test_share_of_a_batch_is_every_wth_sample() -> None:
    assert [share_of(7, rank, 3) for rank in range(3)] == [3, 2, 2]
    assert [share_of(1, rank, 3) for rank in range(3)] == [1, 0, 0]


@pytest.mark.parametrize(
    ("size", "world", "words"),
    [
        (30, 4, "got 30 and 4. Use 28 or 32."),
        (2, 4, "got 2 and 4. Use 4 or 8."),
        (0, 2, "got 0 and 2. Use 2 or 4."),
        (-5, 1, "got -5. Use 1 or 2."),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_two_that_do(
    size: int, world: int, words: str
) -> None:
    with pytest.raises(UsageError) as refusal:
        batch_sizes(DataConfig(global_batch_size=size), world)
    assert words in str(refusal.value)
    for repair in (int(word.strip(".")) for word in words.split() if word.strip(".").isdigit()):
        if repair not in (size, world):
            assert batch_sizes(DataConfig(global_batch_size=repair), world).per_process >= 1


def test_an_evaluation_batch_need_not_divide() -> None:
    assert batch_sizes(DataConfig(global_batch_size=8, eval_batch_size=7), 2).eval_per_process == 4


@pytest.mark.parametrize("index", [3, slice(None), slice(4, 1, -1), slice(2, 2), slice(-2, None)])
def test_samples_are_indexed_as_a_list_is(index: int | slice) -> None:
    columns = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    rows = list(range(6))[index]
    found = Tensors(*columns)[index]
    assert all(torch.equal(column[rows], mine) for column, mine in zip(columns, found, strict=True))
