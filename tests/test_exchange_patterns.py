"""Other ways of exchanging give what they say, and move the bytes that they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import simulated
import torch
from conftest import Launch
from counting import ranks_agree, traffic
from faults import break_at
from left import checkpoint, flat, history, network_weights, weights

RUN = [
    "data=indexed",
    "data.datasets.train=67",  # 6 batches of 12; the last one has 7 samples
    "data.global_batch_size=12",
    "model=mlp",
    "model.network.features=10",
    "model.network.width=32",
    "optimizer=sgd",
    "scheduler=none",
    "optimizer.lr=1e-4",
    "callbacks=recording",
    "trainer.max_epochs=2",
]
COUNTED = (
    "+callbacks.traffic={_target_: counting.Traffic, directory: '${hydra:runtime.output_dir}'}"
)
GRADIENTS = 4 * ((10 + 1) * 32 + (32 + 1) * 32 + 32 + 1)
"""Bytes of all gradients of `RUN`'s network."""


def apart(one: Path, other: Path) -> float:
    """The largest difference of two runs' last weights, relative to the largest weight."""
    first, second = flat(weights(one)), flat(weights(other))
    return float((first - second).abs().max() / second.abs().max())


def validation_losses(directory: Path) -> dict[int, float]:
    """By the number of steps before."""
    table = [row for row in history(directory) if row["val/loss"]]
    assert len(table) == 6
    return {int(row["step"]) + 1: float(row["val/loss"]) for row in table}


@pytest.mark.processes
def test_a_parameter_server_gives_the_weights_of_ddp(launch: Launch, tmp_path: Path) -> None:
    """Rank 0 receives (W - 1) times the gradients in each step, the others once."""
    launch(*RUN, directory=tmp_path / "single")
    for ranks in (2, 3, 4):
        where = [f"trainer.devices={ranks}", COUNTED]
        launch(*RUN, "strategy=ddp_ps", *where, directory=tmp_path / f"ps{ranks}")
        launch(*RUN, "strategy=ddp", *where[:1], directory=tmp_path / f"ddp{ranks}")
        assert apart(tmp_path / f"ps{ranks}", tmp_path / f"ddp{ranks}") < 1e-6, ranks
        assert apart(tmp_path / f"ps{ranks}", tmp_path / "single") < 1e-6, ranks
        server, *workers = traffic(tmp_path / f"ps{ranks}")
        each = 12 * GRADIENTS
        at_the_server = (ranks - 1) * each
        assert server == {"send": at_the_server, "receive": at_the_server, "all_reduce": 0}
        assert workers == [{"send": each, "receive": each, "all_reduce": 0}] * (ranks - 1)


LOW_RANK = [
    "strategy=ddp_power_sgd",
    "strategy.options.hook_options={matrix_approximation_rank: 2, start_powerSGD_iter: 3}",
]
BREAK = break_at(1, 2, "SIGTERM", rank=1)


@pytest.mark.processes
def test_hooks_change_results_by_no_more_than_their_rounding(
    launch: Launch, tmp_path: Path
) -> None:
    """A last batch of 7 on 2 ranks weighs 4 and 3: equal weights would be 8e-4 off."""
    launch(*RUN, directory=tmp_path / "single")
    for preset, numbers, closest, farthest in (
        ("ddp_static_graph", GRADIENTS, 0.0, 1e-6),
        ("ddp_fp16", GRADIENTS // 2, 1e-7, 3e-4),
        ("ddp_bf16", GRADIENTS // 2, 1e-7, 2e-3),
    ):
        run = tmp_path / preset
        launch(*RUN, f"strategy={preset}", "trainer.devices=2", COUNTED, directory=run)
        assert closest <= apart(run, tmp_path / "single") <= farthest, preset
        assert [seen["all_reduce"] for seen in traffic(run)] == [12 * numbers] * 2


@pytest.mark.processes
def test_power_sgd_sends_thin_factors_and_is_resumed_as_it_was(
    launch: Launch, tmp_path: Path
) -> None:
    """What each rank left out, and the factors, come back; torch lays buckets out anew."""
    launch(*RUN, *LOW_RANK, "trainer.devices=2", COUNTED, directory=tmp_path / "whole")
    exact = 4 * (32 + 32 + 32 + 1)  # biases, and the last matrix, which is one row
    thin = 4 * 2 * ((10 + 32) + (32 + 32))
    sent = 3 * GRADIENTS + 9 * (thin + exact)
    assert [seen["all_reduce"] for seen in traffic(tmp_path / "whole")] == [sent] * 2
    with pytest.raises(SystemExit):
        launch(*RUN, *LOW_RANK, "trainer.devices=2", BREAK, directory=tmp_path / "cut")
    launch(f"resume={tmp_path / 'cut'}", "trainer.devices=2", directory=tmp_path / "cut")
    assert apart(tmp_path / "cut", tmp_path / "whole") < 1e-6


@pytest.fixture
def start(launch: Launch, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The network before the first step."""
    launch(*RUN, "optimizer.lr=0", directory=tmp_path / "start")
    return network_weights(tmp_path / "start")


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_local_sgd_and_ddp_async_compute_what_plain_torch_computes(
    launch: Launch, tmp_path: Path, start: dict[str, torch.Tensor], ranks: int
) -> None:
    """Uneven last batches included; how often a run is evaluated changes nothing."""
    cases = {
        "local": (["strategy=local_sgd", "strategy.options.period=5"], 4 * GRADIENTS),
        "seen": (["strategy=local_sgd", "strategy.options.period=5"], None),
        "async": (["strategy=ddp_async"], 12 * GRADIENTS),
    }
    expected = {
        "local": simulated.local_sgd(start, ranks, period=5),
        "seen": simulated.local_sgd(start, ranks, period=5),
        "async": simulated.ddp_async(start, ranks),
    }
    for name, (overrides, moved) in cases.items():
        more = ["trainer.val_check_interval=2"] if name == "seen" else []
        where = [*overrides, *more, f"trainer.devices={ranks}", COUNTED]
        launch(*RUN, *where, directory=tmp_path / name)
        oracle = expected[name].double()
        difference = (flat(weights(tmp_path / name)) - oracle).abs().max() / oracle.abs().max()
        assert difference < 1e-6, name
        assert ranks_agree(tmp_path / name), name
        if moved is not None:
            assert {seen["all_reduce"] for seen in traffic(tmp_path / name)} == {moved}, name
    for step, loss in validation_losses(tmp_path / "seen").items():
        average = simulated.local_sgd(start, ranks, period=5, steps=step)
        assert loss == pytest.approx(simulated.validation_loss(average, start), rel=1e-5), step


@pytest.mark.processes
def test_a_single_process_is_plain_sgd_and_a_period_of_one_is_ddp(
    launch: Launch, tmp_path: Path
) -> None:
    launch(*RUN, directory=tmp_path / "single")
    for name in ("local_sgd", "ddp_async"):
        launch(*RUN, f"strategy={name}", "trainer.devices=1", directory=tmp_path / name)
        assert apart(tmp_path / name, tmp_path / "single") == 0, name
    each = ["strategy=local_sgd", "strategy.options.period=1", "trainer.devices=2"]
    launch(*RUN, *each, directory=tmp_path / "each")
    assert apart(tmp_path / "each", tmp_path / "single") < 1e-6


@pytest.mark.processes
@pytest.mark.parametrize("overrides", [["local_sgd", "strategy.options.period=4"], ["ddp_async"]])
def test_a_run_stopped_between_two_exchanges_goes_on_as_it_was(
    launch: Launch, tmp_path: Path, overrides: list[str]
) -> None:
    """With Adam, whose moments differ between ranks under local_sgd."""
    run = [*RUN, "optimizer=adam", "optimizer.lr=1e-2", "trainer.devices=2"]
    where = [f"strategy={overrides[0]}", *overrides[1:]]
    launch(*run, *where, directory=tmp_path / "whole")
    with pytest.raises(SystemExit):
        launch(*run, *where, BREAK, directory=tmp_path / "cut")
    saved = checkpoint(tmp_path / "cut", "interrupted")
    own = saved["exchange"]["state"].get("own") or []
    for name in own[0] if own else []:
        first, second = own[0][name], own[1][name]
        assert not torch.equal(first, second), "steps after the last average"
        torch.testing.assert_close(saved["state_dict"][name], (first + second) / 2)
    assert bool(own) == (overrides[0] == "local_sgd")
    launch(f"resume={tmp_path / 'cut'}", "trainer.devices=2", COUNTED, directory=tmp_path / "cut")
    assert apart(tmp_path / "cut", tmp_path / "whole") < 1e-6
    assert ranks_agree(tmp_path / "cut")
