"""Ranks that hold parts of a network compute what one device computes.

The oracle is the same command on one device: its loss curve to 1e-5, its weights to 1e-6 of the
largest (Adam lifts roundings, so that of the transformer is SGD), and the size of its parameters.
"""

# needs: text
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Launch, quick_and_slow
from faults import break_at
from left import assert_weights_equal, checkpoint, history, weights

from lockstep.errors import RunFailed, UsageError
from lockstep.modelparallel.stages import parts_of, stages_of
from lockstep.models import mlp

pytestmark = pytest.mark.processes

MLP = [
    "scheduler=none",  # one would depend on the length of the run
    "optimizer.lr=0.01",
    "trainer.max_epochs=2",
    "data.datasets.train=401",  # 7 batches of 60; the last one has 41 samples
    "data.global_batch_size=60",
    "features=[grad_norm]",  # the curve step by step
    "trainer.log_every_n_steps=1",
    "trainer.gradient_clip_val=0.5",
]
TRANSFORMER = [
    "experiment=text/language_model",
    "trainer.accelerator=cpu",
    "trainer.max_epochs=2",
    "data.datasets.train_bytes=3000",
    "data.datasets.val_bytes=900",
    "data.datasets.test_bytes=901",
    "data.datasets.cut=definitions",  # of unequal length
    "data.global_batch_size=12",
    "data.eval_batch_size=12",
    "model.network.context=32",
    "model.network.width=32",
    "model.network.heads=4",
    "model.network.depth=2",
    "features=[grad_norm]",  # the curve step by step
    "trainer.log_every_n_steps=1",
    "trainer.gradient_clip_val=0.5",
    "scheduler=none",
    "optimizer=sgd",
    "optimizer.lr=0.5",
]
MODELS = {"mlp": MLP, "transformer": TRANSFORMER}
PLACES = {
    "fsdp-2": ["strategy=fsdp", "trainer.devices=2"],
    "fsdp-3": ["strategy=fsdp", "trainer.devices=3"],
    "tp-2": ["strategy=tensor_parallel", "trainer.devices=2"],
    "tp-4": ["strategy=tensor_parallel", "trainer.devices=4"],
    "pipeline-2": ["strategy=pipeline", "trainer.devices=2"],
    "pipeline-3": ["strategy=pipeline", "trainer.devices=3"],
    "2x2": ["strategy=fsdp", "strategy.options.tensor_parallel_size=2", "trainer.devices=4"],
}
REPLICATED = {"mlp": 0.03, "transformer": 0.11}
"""The share of parameters that tensor parallelism leaves whole on each rank: biases behind a sum,
norms, places, and the MLP's last layer."""
QUICK = [
    ("mlp", "fsdp-2"),
    ("transformer", "fsdp-2"),
    ("mlp", "2x2"),
    ("transformer", "tp-2"),
    ("transformer", "pipeline-3"),
]


def assert_same(directory: Path, reference: Path) -> None:
    expected, actual = weights(reference), weights(directory)
    assert list(actual) == list(expected)
    assert {type(weight) for weight in actual.values()} == {torch.Tensor}
    assert_weights_equal(actual, expected)
    curve, told = history(reference), history(directory)
    assert len(told) == len(curve) >= 14
    for row, other in zip(curve, told, strict=True):
        assert numbers(other) == pytest.approx(numbers(row), rel=1e-5)


def numbers(row: dict[str, str]) -> dict[str, float]:
    return {key: float(value) for key, value in row.items() if value}


def assert_same_optimizer(directory: Path, reference: Path) -> None:
    """By the numbers that torch gives parameters, each state whole."""
    one, other = (checkpoint(run)["optimizer_states"][0] for run in (reference, directory))
    assert other["state"].keys() == one["state"].keys()
    for number, state in one["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(other["state"][number][key], value, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {}


def on_one_device(launch: Launch, single: dict[str, Any], model: str, directory: Path) -> Any:
    """The oracle, computed once a session; it outlives the test's own directory."""
    if model not in single:
        overrides = [*MODELS[model], "predict=true"]
        single[model] = launch(*overrides, directory=directory)
    return single[model]


@pytest.mark.parametrize(
    ("model", "place"), quick_and_slow([(m, p) for m in MODELS for p in PLACES], QUICK)
)
def test_split_networks_train_as_on_one_device(
    launch: Launch,
    single: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    model: str,
    place: str,
) -> None:
    """Loss curve, weights, optimizer state, predictions, samples seen, and bytes on each rank."""
    one = on_one_device(launch, single, model, tmp_path_factory.mktemp("single"))
    reference = Path(one["directory"])
    split = launch(*MODELS[model], *PLACES[place], "predict=true", directory=tmp_path / "split")
    assert_same(tmp_path / "split", reference)
    assert_same_optimizer(tmp_path / "split", reference)
    assert split["samples_seen"] == one["samples_seen"]
    for name, value in one["metrics"].items():
        assert split["metrics"][name] == pytest.approx(value, rel=1e-5), name
    expected = torch.load(reference / "predictions.pt", weights_only=True)
    actual = torch.load(tmp_path / "split" / "predictions.pt", weights_only=True)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    (whole,) = one["parameter_bytes"]
    ranks = split["world_size"]
    assert len(split["parameter_bytes"]) == ranks
    if place.startswith(("fsdp", "pipeline")):
        assert sum(split["parameter_bytes"]) == whole
    if not place.startswith("pipeline"):
        spare = (0.02 if place == "fsdp-2" else REPLICATED[model]) * whole
        assert max(split["parameter_bytes"]) <= whole / ranks + spare
    elif model == "transformer":  # its parts are two blocks, and a smaller one at each end
        assert max(split["parameter_bytes"]) <= {2: 0.52, 3: 0.50}[ranks] * whole


@pytest.mark.parametrize(
    ("model", "before", "after"),
    quick_and_slow(
        [
            ("mlp", "fsdp-2", "fsdp-3"),
            ("mlp", "fsdp-2", "one"),
            ("mlp", "one", "2x2"),
            ("transformer", "2x2", "tp-2"),
            ("transformer", "tp-4", "fsdp-2"),
            ("transformer", "pipeline-3", "one"),
            ("mlp", "pipeline-2", "pipeline-3"),
        ],
        [("mlp", "fsdp-2", "fsdp-3")],
    ),
)
def test_a_split_run_goes_on_with_other_ranks(
    launch: Launch,
    single: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    model: str,
    before: str,
    after: str,
) -> None:
    places = {**PLACES, "one": ["strategy=auto", "trainer.devices=1"]}
    one = on_one_device(launch, single, model, tmp_path_factory.mktemp("single"))
    run = tmp_path / "run"
    launch(*MODELS[model], *places[before], "trainer.max_epochs=1", directory=run)
    launch(f"resume={run}", *places[after], "trainer.max_epochs=2", directory=run)
    assert_same(run, Path(one["directory"]))


def test_a_split_run_that_broke_and_was_stopped_ends_as_if_it_had_not(
    launch: Launch,
    single: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
) -> None:
    """A rank of fsdp breaks, one of 2x2 is stopped inside an epoch; one device ends it."""
    one = on_one_device(launch, single, "mlp", tmp_path_factory.mktemp("single"))
    run = tmp_path / "run"
    with pytest.raises(RunFailed, match="broken on purpose"):
        launch(*MLP, *PLACES["fsdp-2"], break_at(1, 3), directory=run)
    assert [path.name for path in (run / "checkpoints").glob("last*")] == ["last.ckpt"]
    stopped = break_at(1, 2, "SIGTERM", rank=3).replace(
        "${hydra:runtime.output_dir}", f"{tmp_path}"
    )
    with pytest.raises(SystemExit):
        launch(f"resume={run}", *PLACES["2x2"], stopped, directory=run)
    result = launch(f"resume={run}", "strategy=auto", "trainer.devices=1", directory=run)
    assert result["resumed_from"] == str(run / "checkpoints" / "interrupted.ckpt")
    assert_same(run, Path(one["directory"]))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["strategy=fsdp", "strategy.options.tensor_parallel_size=3", "trainer.devices=4"],
            r"tensor_parallel_size must divide the number of processes; got 3 and 4. Use 1 or 2 or",
        ),
        (
            [*TRANSFORMER, "strategy=tensor_parallel", "trainer.devices=3"],
            r"got 4 heads and 3 processes .* Use model.network.heads=6, or share over 1 or 2 or 4",
        ),
        (
            ["strategy=fsdp", "trainer.devices=2", "data.global_batch_size=31"],
            r"divisible by the number of processes; got 31 and 2. Use 30 or 32",
        ),
        (["strategy=fsdp", "trainer.devices=2", "compile=true"], r"Use compile=false"),
        (
            ["strategy=pipeline", "trainer.devices=2", "compile=true"],
            r"compile=True does not work with trainer.strategy=pipeline",
        ),
        (
            ["strategy=fsdp", "trainer.devices=2", "trainer.precision=16-true"],
            r"trainer.precision=16-true .* Use trainer.precision=bf16-mixed",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_before_any_process(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, overrides: list[str], told: str
) -> None:
    def nothing_starts(*_: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("lockstep.launch.in_ranks", nothing_starts)
    with pytest.raises(UsageError, match=told):
        launch(*overrides)


def test_a_pipeline_is_cut_where_its_largest_stage_is_smallest() -> None:
    parts = parts_of(mlp.MLP(4, 4, width=4, depth=5))  # six layers of 20 weights, five ReLU
    for count, expected in ((1, [120]), (2, [60, 60]), (3, [40] * 3), (4, [20, 20, 40, 40])):
        stages = stages_of(parts, count)
        assert [part for stage in stages for part in stage] == parts
        assert [sum(part.weights for part in stage) for stage in stages] == expected
    with pytest.raises(UsageError, match=r"6 parts and 7 processes. Use trainer.devices=6"):
        stages_of(parts, 7)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["strategy=tensor_parallel", "model.network.width=63"], r"has 63 outputs and 2 processes"),
        (["strategy=pipeline", "model.network.depth=0"], r"got 1 parts and 2 processes"),
        (["strategy=fsdp", "model=batch_norm"], r"fsdp cannot have BatchNorm.* Use GroupNorm"),
        (["strategy=tensor_parallel", "model=linear"], r"Linear .* no tensor_parallel_plan"),
    ],
)
def test_what_the_ranks_cannot_split_is_one_usage_error(
    launch: Launch, overrides: list[str], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        launch(*overrides, "trainer.devices=2")
