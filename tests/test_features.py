"""Each cell of the table in docs/features.md: feature x strategy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Launch, on
from faults import break_at
from left import assert_weights_equal, checkpoint, column, weights
from recording import indexed
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torchmetrics import MeanAbsoluteError

from lockstep.epoch_mean import EpochMean, keep_sums_precise
from lockstep.errors import RunFailed, UsageError
from lockstep.features.recompute import chosen, recompute
from lockstep.models.mlp import MLP
from lockstep.randomness import seed_everything
from lockstep.results import read_result
from lockstep.schedules import warmup

RUN = [
    "data=indexed",
    "data.shuffle=false",
    "model=mlp",
    "model.network.width=8",
    "optimizer=sgd",
    "optimizer.lr=1e-3",
    "scheduler=none",
    "trainer.log_every_n_steps=1",
]
MANY = [
    *RUN,
    "debug=trace",
    "features=[ema,early_stopping,grad_norm,recompute,device_stats]",
    "callbacks.ema.decay=0.8",
    "callbacks.early_stopping.patience=2",
    "callbacks.early_stopping.min_delta=1e9",  # nothing is better
    "callbacks.checkpoint.save_top_k=2",
    "trainer.max_epochs=6",
    "trainer.accumulate_grad_batches=2",
    "trainer.gradient_clip_val=5",
    "scheduler=warmup",
    "scheduler.warmup_steps=3",
]
EPOCHS, STEPS, CLIP = 3, 12, 5.0
PRECISE = [*RUN, "trainer.max_epochs=2", "trainer.gradient_clip_val=1"]
COMBINATIONS = {
    "many": MANY,
    "value": [*PRECISE, "trainer.gradient_clip_algorithm=value"],
    "bf16-mixed": [*PRECISE, "trainer.precision=bf16-mixed"],
    "bf16-true": [*PRECISE, "trainer.precision=bf16-true"],
    "16-mixed": [*PRECISE, "trainer.precision=16-mixed"],
    "compile": [*PRECISE, "compile=true"],
}
"""As many features on one launch as do not disturb each other."""
FEATURES = {
    "clip by norm": "many",
    "clip by value": "value",
    "accumulation": "many",
    "warm-up in steps": "many",
    "average of the weights": "many",
    "early stopping": "many",
    "best k checkpoints": "many",
    "gradient norm": "many",
    "activation checkpointing": "many",
    "timeline": "many",
    "device stats": "many",
    "bf16-mixed": "bf16-mixed",
    "bf16-true": "bf16-true",
    "16-mixed": "16-mixed",
    "compile": "compile",
}
REFUSALS = {"16-mixed": "Use trainer.precision=bf16-mixed", "compile": "compile=false"}
STRATEGIES = ["single", "dp", "ddp", "ddp_spawn"]
SLOW = {"compile": STRATEGIES, "bf16-true": ["ddp_spawn"], "bf16-mixed": ["ddp_spawn"]}


def table() -> dict[tuple[str, str], str]:
    """(feature, strategy) -> what docs/features.md says of it."""
    lines = (ROOT / "docs" / "features.md").read_text().splitlines()
    rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in lines if line.startswith("| ")]
    assert rows[0][2:6] == STRATEGIES
    return {(row[0], name): row[2 + i] for row in rows[1:] for i, name in enumerate(STRATEGIES)}


TABLE = table()


def test_each_cell_of_the_table_has_its_test() -> None:
    # They train nothing: tests/test_find.py, tests/test_find_batch.py.
    finders = {"learning-rate finder", "batch-size finder"}
    assert {feature for feature, _ in TABLE} == set(FEATURES) | finders
    assert set(TABLE.values()) == {"same", "close", "refused"}


def where(strategy: str) -> list[str]:
    return on("auto", 1) if strategy == "single" else on(strategy)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this module's runs lie: one per combination and strategy."""
    return tmp_path_factory.mktemp("features")


@pytest.fixture
def run_of(launch: Launch, directories: Path) -> Callable[[str, str], Path]:
    def run(combination: str, strategy: str) -> Path:
        directory = directories / f"{combination}-{strategy}"
        if not directory.exists():
            overrides = [*COMBINATIONS[combination], "trainer.accelerator=cpu", *where(strategy)]
            launch(*overrides, directory=directory)
        return directory

    return run


def by_hand() -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """The run of `MANY` in plain torch: average, weights, norms before clipping."""
    seed_everything(0)
    network = MLP(10, 1, width=8)
    average = AveragedModel(network, avg_fn=get_ema_avg_fn(0.8))
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    scheduler = warmup(optimizer, warmup_steps=3, total_steps=24)  # of 6 epochs, stopped or not
    inputs, targets = indexed(64, 1, 1).train.tensors
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = slice(step % 4 * 16, step % 4 * 16 + 16)  # two global batches of 8
        nn.functional.mse_loss(network(inputs[rows]), targets[rows]).backward()
        norms.append(nn.utils.clip_grad_norm_(network.parameters(), CLIP).item())
        optimizer.step()
        scheduler.step()
        average.update_parameters(network)
    return average.module.state_dict(), network.state_dict(), norms


def check_clip(directory: Path) -> None:
    assert min(column(directory, "train/grad_norm")) > CLIP
    _, last, _ = by_hand()
    expected = {f"network.{name}": weight for name, weight in last.items()}
    assert_weights_equal(weights(directory, "current_model_state"), expected)


def check_accumulation(directory: Path) -> None:
    result = read_result(directory / "result.json")
    assert result["steps"] == STEPS == EPOCHS * 64 // (2 * 8)


def check_warm_up(directory: Path) -> None:
    (scheduler,) = checkpoint(directory)["lr_schedulers"]
    assert scheduler["last_epoch"] == STEPS


def check_average(directory: Path) -> None:
    average, _, _ = by_hand()
    expected = {f"network.{name}": weight for name, weight in average.items()}
    assert_weights_equal(weights(directory), expected)
    # The last validation was the average's.
    network = MLP(10, 1, width=8)
    network.load_state_dict(average)
    inputs, targets = indexed(64, 33, 33).val.tensors
    loss = nn.functional.mse_loss(network(inputs), targets).item()
    assert column(directory, "val/loss")[-1] == pytest.approx(loss, rel=1e-6)


def check_early_stopping(directory: Path) -> None:
    assert read_result(directory / "result.json")["epochs"] == EPOCHS  # the first, and two more


def check_best_k(directory: Path) -> None:
    kept = {path.name for path in directory.glob("checkpoints/epoch*.ckpt")}
    losses = column(directory, "val/loss")
    best = sorted(range(EPOCHS), key=losses.__getitem__)[:2]
    assert kept == {f"epoch{i:03d}-step{(i + 1) * 4:06d}.ckpt" for i in best}


def check_norm(directory: Path) -> None:
    _, _, norms = by_hand()
    # Lightning logs after each micro-step: the norm of the step that came last.
    logged = list(dict.fromkeys(column(directory, "train/grad_norm")))
    assert logged == pytest.approx(norms, rel=1e-5)


def check_recompute(directory: Path) -> None:
    assert all("_checkpoint" not in name for name in weights(directory))


def check_timeline(directory: Path) -> None:
    ranks = 2 if "ddp" in directory.name else 1
    traces = sorted(directory.glob("trace-rank*.json"))
    assert [path.name for path in traces] == [f"trace-rank{rank}.json" for rank in range(ranks)]
    for path in traces:
        names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
        assert len([name for name in names if str(name).startswith("ProfilerStep#")]) >= 3
        assert "aten::addmm" in names


def check_device_stats(directory: Path) -> None:
    assert len(column(directory, "DeviceStatsMonitor.on_train_batch_start/cpu_percent")) >= STEPS


def check_bf16(directory: Path) -> None:
    is_true = "true" in directory.name
    kinds = {weight.dtype for weight in weights(directory).values()}
    assert kinds == {torch.bfloat16 if is_true else torch.float32}
    # Sums of an epoch are not in bf16, which cannot count to 300.
    seen = read_result(directory / "result.json")["samples_seen"]
    assert seen == {"train": 64, "val": 33, "test": 33}

    (loss,) = column(directory, "test/loss")
    assert loss != float(torch.tensor(loss).bfloat16())  # a mean in bf16 has 8 bits


def check_compile(directory: Path) -> None:
    assert not any("_orig_mod" in name for name in weights(directory))


def check_nothing_more(directory: Path) -> None:
    """The weights, which are compared for every feature, are what it changes."""


CHECKS: dict[str, Callable[[Path], None]] = {
    "clip by norm": check_clip,
    "clip by value": check_nothing_more,
    "accumulation": check_accumulation,
    "warm-up in steps": check_warm_up,
    "average of the weights": check_average,
    "early stopping": check_early_stopping,
    "best k checkpoints": check_best_k,
    "gradient norm": check_norm,
    "activation checkpointing": check_recompute,
    "timeline": check_timeline,
    "device stats": check_device_stats,
    "bf16-mixed": check_bf16,
    "bf16-true": check_bf16,
    "compile": check_compile,
}


def cells() -> list[Any]:
    return [
        pytest.param(
            *cell,
            id="-".join(cell).replace(" ", "_"),
            marks=pytest.mark.slow if cell[1] in SLOW.get(FEATURES[cell[0]], []) else (),
        )
        for cell in TABLE
        if cell[0] in FEATURES
    ]


@pytest.mark.processes
@pytest.mark.parametrize(("feature", "strategy"), cells())
def test_a_feature_does_under_a_strategy_what_the_table_says(
    run_of: Callable[[str, str], Path], feature: str, strategy: str
) -> None:
    says, combination = TABLE[feature, strategy], FEATURES[feature]
    if says == "refused":
        with pytest.raises((UsageError, RunFailed), match=re.escape(REFUSALS[feature])):
            run_of(combination, strategy)
        return
    single, directory = run_of(combination, "single"), run_of(combination, strategy)
    tolerance = 1e-6 if says == "same" else 0.02
    assert_weights_equal(weights(directory), weights(single), tolerance)
    expected = column(single, "val/loss")
    assert column(directory, "val/loss") == pytest.approx(expected, rel=max(1e-5, tolerance))
    CHECKS[feature](directory)


LONG = [item for item in MANY if "early" not in item and "features" not in item]
LONG += ["features=[ema,grad_norm,recompute]", "trainer.max_epochs=3", "callbacks.trace=null"]


@pytest.mark.processes
@pytest.mark.parametrize(("before", "after"), [("ddp", "single"), ("single", "ddp_spawn")])
def test_a_run_stopped_in_an_epoch_keeps_its_schedule_and_its_average(
    launch: Launch, tmp_path: Path, directories: Path, before: str, after: str
) -> None:
    reference, stopped = directories / "uninterrupted", tmp_path / "stopped"
    if not reference.exists():
        launch(*LONG, directory=reference)
    with pytest.raises(SystemExit):
        launch(*LONG, *where(before), break_at(1, 3, "SIGTERM"), directory=stopped)
    result = launch(f"resume={stopped}", *where(after), directory=stopped)
    assert result["steps"] == STEPS
    assert Path(result["resumed_from"] or "").name == "interrupted.ckpt"
    for key in ("current_model_state", "state_dict"):
        assert_weights_equal(weights(stopped, key), weights(reference, key))
    rates = [checkpoint(run)["lr_schedulers"] for run in (stopped, reference)]
    assert rates[0][0]["_last_lr"] == pytest.approx(rates[1][0]["_last_lr"], abs=1e-15)


def test_recompute_keeps_less_and_gives_the_gradients_of_a_run_without_it() -> None:
    def stored_and_gradients(recomputed: bool) -> tuple[int, list[Tensor]]:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(32, 128), nn.Dropout(0.5), nn.Linear(128, 32))] * 3
        network = nn.ModuleList(blocks)
        if recomputed:
            for name in chosen(network, ["*"]):
                recompute(name, network.get_submodule(name))
        kept: list[int] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor.numel())
            return tensor

        hidden = torch.randn(64, 32)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            for block in network:
                hidden = block(hidden)
        stored = sum(kept)
        hidden.square().mean().backward()
        gradients = [item.grad for item in network.parameters() if item.grad is not None]
        return stored, gradients

    plain, expected = stored_and_gradients(recomputed=False)
    less, gradients = stored_and_gradients(recomputed=True)
    assert less < plain / 4
    for gradient, reference in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, reference)


def test_recompute_refuses_what_it_cannot_do_by_name() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(UsageError, match=r"must hold no BatchNorm.*got net"):
        recompute("net", network)
    with pytest.raises(UsageError, match=r"none is like blocks\.\*\. There are: 0, 1\."):
        chosen(network, ["blocks.*"])
    # The items of a ModuleList, and of those within them, the outer ones.
    module = nn.Module()
    module.network = nn.ModuleList([nn.ModuleList([nn.Linear(1, 1)]), nn.Linear(1, 1)])
    assert chosen(module, None) == ["network.0", "network.1"]


def test_sums_of_a_module_in_bf16_are_precise() -> None:
    module = nn.ModuleList([EpochMean(), MeanAbsoluteError(), nn.Linear(1, 1)]).bfloat16()
    module = module.to(torch.bfloat16)  # as Lightning does
    keep_sums_precise(module)
    mean, error, layer = module
    assert layer.weight.dtype == torch.bfloat16
    for _ in range(2):
        for _ in range(1000):
            mean.update(torch.tensor(1.0), 1)
            error.update(torch.ones(1), torch.zeros(1))
        assert (mean.total.item(), error.sum_abs_error.item()) == (1000, 1000)
        assert mean.samples.dtype == error.total.dtype == torch.int64
        mean.reset()
        error.reset()
