"""The promise: strategy and device count decide where a run is computed, never what.

Tolerances: float32 sums in another order differ in the last bits, and training carries that on;
1e-6 relative to the largest weight is some tens of such bits. In float64 the same argument gives
1e-10 with room to spare; a wrong batch or a wrong mean is off by 1e-2 or more.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import DDP2, SMALL, Command, Launch, on, quick_and_slow
from left import assert_weights_equal, weights
from recording import global_batches, rows

PLACES = [
    pytest.param(strategy, devices, id=f"{strategy}-{devices}")
    for strategy in ("dp", "ddp", "ddp_spawn")
    for devices in (1, 2, 3, 4)
]
MODELS = {
    "linear": ["experiment=tutorial/linear"],
    "simple_model": ["experiment=tutorial/simple_model"],
    "random_dataset": ["experiment=tutorial/random_dataset"],
    "mlp": ["model=mlp", "trainer.max_epochs=1", "data.datasets.train=400"],
}


@pytest.mark.processes
@pytest.mark.parametrize(("strategy", "devices"), PLACES)
def test_global_batches_hold_the_same_samples_everywhere(
    launch: Launch, tmp_path: Path, strategy: str, devices: int
) -> None:
    overrides = [*SMALL, "callbacks=recording", "trainer.max_epochs=2", "data.global_batch_size=12"]
    launch(*overrides, directory=tmp_path / "single")
    result = launch(
        *overrides,
        *on(strategy, devices),
        directory=tmp_path / "spread",
    )
    single, spread = (global_batches(tmp_path / name) for name in ("single", "spread"))
    # 64 samples in batches of 12 end with a batch of 4: each sample once an epoch, none twice.
    assert [len(batch) for batch in single.values()] == [12, 12, 12, 12, 12, 4] * 2
    assert spread == single
    assert single[0, 0] != single[1, 0], "each epoch has its own order"
    for stage in ("val", "test"):
        seen = [row for row in rows(tmp_path / "spread") if row["stage"] == stage]
        epochs = {row["epoch"] for row in seen}
        for epoch in epochs:
            indices = [i for row in seen if row["epoch"] == epoch for i in row["indices"]]
            assert sorted(indices) == list(range(33)), f"{stage} sees each sample once"
    assert result["samples_seen"] == {"train": 64, "val": 33, "test": 33}
    alive = {row["world_size"] for row in rows(tmp_path / "spread")}
    processes = {row["pid"] for row in rows(tmp_path / "spread")}
    expected = 1 if strategy == "dp" else devices
    assert alive == {expected}
    assert len(processes) == expected == result["world_size"]
    assert sorted(processes) == sorted(result["pids"])


@pytest.mark.processes
@pytest.mark.parametrize("model", MODELS)
def test_weights_and_metrics_equal_the_single_device(launch: Launch, model: str) -> None:
    overrides = [*MODELS[model], "data.global_batch_size=60"]
    single = launch(*overrides)
    for strategy, devices in (("dp", 2), ("dp", 3), ("ddp", 2), ("ddp", 3), ("ddp_spawn", 4)):
        where = on(strategy, devices)
        spread = launch(*overrides, *where)
        expected = weights(single["directory"])
        assert_weights_equal(weights(spread["directory"]), expected, of=f"{strategy} on {devices}")
        assert spread["steps"] == single["steps"]
        assert spread["metrics"].keys() == single["metrics"].keys()
        for name, value in single["metrics"].items():
            assert spread["metrics"][name] == pytest.approx(value, rel=1e-5), (strategy, name)


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["dp", "ddp", "ddp_spawn"])
def test_float64_weights_equal_to_1e_10(launch: Launch, strategy: str) -> None:
    overrides = [
        "model=mlp",
        "trainer.precision=64-true",
        "trainer.max_epochs=2",
        "data.datasets.train=401",
        "data.global_batch_size=60",
    ]
    single = weights(launch(*overrides)["directory"])
    for devices in (2, 3):
        spread = launch(*overrides, *on(strategy, devices))
        assert_weights_equal(weights(spread["directory"]), single, 1e-10, of=f"{devices} devices")


@pytest.mark.processes
def test_accumulation_and_clipping_do_not_depend_on_the_device_count(launch: Launch) -> None:
    overrides = [
        "model=mlp",
        "trainer.max_epochs=1",
        "trainer.accumulate_grad_batches=3",
        "data.global_batch_size=64",
        "trainer.gradient_clip_val=0.1",
        "data.datasets.train=500",
    ]
    single = launch(*overrides)
    expected = weights(single["directory"])
    for strategy in ("dp", "ddp"):
        spread = launch(*overrides, *on(strategy))
        assert spread["steps"] == single["steps"] == 3  # 8 micro-steps: windows of 3, 3 and 2
        assert_weights_equal(weights(spread["directory"]), expected, of=strategy)


@pytest.mark.processes
def test_more_processes_than_samples_in_a_batch_train_on_each_sample_once(
    launch: Launch, tmp_path: Path
) -> None:
    # 13 samples in batches of 4: the last batch has one sample for 4 ranks.
    overrides = [
        *SMALL,
        "data.datasets.train=13",
        "data.datasets.val=3",
        "data.datasets.test=2",
        "data.global_batch_size=4",
        "optimizer.lr=1e-3",
    ]
    single = launch(*overrides)
    spread = launch(*overrides, *on("ddp", 4))
    assert spread["samples_seen"] == {"train": 13, "val": 3, "test": 2}
    assert_weights_equal(weights(spread["directory"]), weights(single["directory"]))
    for name, value in single["metrics"].items():
        assert spread["metrics"][name] == pytest.approx(value, rel=1e-6)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "samples"),
    quick_and_slow(
        [(module, samples) for module in ("OwnModule", "OwnManual") for samples in (53, 50)],
        [("OwnModule", 50), ("OwnManual", 53)],
    ),
)
def test_a_module_of_ones_own_trains_to_the_weights_of_one_device(
    launch: Launch, module: str, samples: int
) -> None:
    # Batches of 12: the last one has 5 samples, or 2, for up to 3 ranks.
    overrides = [
        "data=only_train",
        f"data.datasets.samples={samples}",
        "model=own",
        f"model._target_=recording.{module}",
        "callbacks=unmonitored",
        "objective=null",
        "trainer.max_epochs=2",
    ]
    single = weights(launch(*overrides)["directory"])
    for strategy, devices in (("ddp", 2), ("ddp", 3), ("ddp_spawn", 2)):
        where = on(strategy, devices)
        spread = weights(launch(*overrides, *where)["directory"])
        assert_weights_equal(spread, single, of=f"{strategy} on {devices}")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("reduction", "told"), quick_and_slow([("sum", 1), ("mean", 0)], [("sum", 1)])
)
def test_a_sum_as_loss_is_told_when_there_are_several_processes(
    train: Command, reduction: str, told: int
) -> None:
    where = [*DDP2, "optimizer.lr=1e-9"]
    warning = "The loss must be a mean over the samples"
    done = train(*SMALL, *where, f"+model.loss.reduction={reduction}", warns=warning)
    assert done.returncode == 0
    assert done.stderr.count(warning) == told
