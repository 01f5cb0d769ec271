"""``python -m lockstep.parity``: it finds what depends on the split, and nothing else."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import CONF, ROOT, TEST_CONF, assert_no_orphans, environment, quick_and_slow

from lockstep.errors import RunFailed, UsageError
from lockstep.parity.__main__ import main
from lockstep.parity.differences import (
    IRREPRODUCIBLE,
    ROUNDING,
    UNKNOWN,
    Judge,
    Record,
    relative,
)

LINEAR = [
    f"hydra.searchpath=[file://{TEST_CONF}]",
    "model=linear",
    "optimizer=sgd",
    "scheduler=none",
    "data.global_batch_size=8",
    "trainer.max_epochs=1",
]
TEACHER = ["data.datasets.train=64", "data.datasets.val=33", "data.datasets.test=33"]


class Row(NamedTuple):
    loss: str
    weights: str
    metrics: str
    verdict: str
    reason: str = ""


class Printed(NamedTuple):
    status: int
    rows: dict[tuple[str, str], Row]
    last: str
    progress: list[str]


def rows_of(lines: list[str]) -> dict[tuple[str, str], Row]:
    header, *rows = (re.split(r"\s{2,}", line) for line in lines)
    assert header == [
        "strategy",
        "devices",
        "loss",
        "weights",
        "metrics",
        "verdict",
        "likely reason",
    ]
    return {(strategy, devices): Row(*rest) for strategy, devices, *rest in rows}


Parity = Callable[..., Printed]


@pytest.fixture
def parity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Parity:
    """Run the command in this process, in a directory with the project's ``conf/``."""
    (tmp_path / "conf").symlink_to(CONF)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Printed:
        status = main([*LINEAR, *arguments])
        out, err = capsys.readouterr()
        *lines, last = out.splitlines()
        return Printed(status, rows_of(lines), last, err.splitlines())

    return run


@pytest.mark.processes
def test_a_linear_model_is_the_same_everywhere(parity: Parity, tmp_path: Path) -> None:
    printed = parity(*TEACHER, "--keep=runs")
    places = [(strategy, str(n)) for strategy in ("dp", "ddp", "ddp_spawn") for n in (1, 2)]
    assert list(printed.rows) == [("one device again", "1"), *places]
    assert printed.status == 0
    assert printed.last == "7 of 7 runs are the same as one device, to 1e-06"
    for (strategy, devices), row in printed.rows.items():
        assert (row.verdict, row.reason) == ("same", ""), strategy
        # In float64, sums in another order: not as good as nothing, better than any tolerance.
        gaps = [float(row.loss), float(row.weights), float(row.metrics)]
        assert max(gaps) < 1e-12
        assert (max(gaps) > 0) == (devices == "2"), "two devices do sum in another order"
    kept = torch.load(tmp_path / "runs" / "ddp-2" / "recording.pt", weights_only=True)
    assert kept["losses"].shape == (8,), "64 samples in batches of 8"
    assert (tmp_path / "runs" / "ddp-2" / "train.log").exists()
    assert len(printed.progress) == 8, "a line per run"


DEPENDENT = {
    "sum": (
        [*TEACHER, "+model.loss.reduction=sum", "optimizer.lr=1e-3"],
        "the loss is a sum, DDP averages over ranks: use a mean (loss)",
    ),
    "augmentation": (
        ["data=noisy", "callbacks=unmonitored"],
        "augmentation: other draws on each rank (the data set)",
    ),
    "dropout": (
        [*TEACHER, "model=dropout"],
        "dropout: other draws on each replica or rank (network.0)",
    ),
    "own_loaders": (
        ["data=own_loaders", "callbacks=unmonitored"],
        "2 steps instead of 4; "
        "a loader of its own gives ranks other batches: return Splits (DataLoader)",
    ),
    "rank_metric": (
        [*TEACHER, "model=linear", "model._target_=split_dependent.WorstOfRank"],
        "test/worst alone: a mean of the ranks' values? Log a torchmetrics object",
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize(
    "case", quick_and_slow([(case,) for case in DEPENDENT], [("sum",), ("rank_metric",)])
)
def test_what_depends_on_the_ranks_is_reported_with_its_reason(parity: Parity, case: str) -> None:
    overrides, reason = DEPENDENT[case]
    printed = parity(*overrides, "--strategies=dp,ddp", "--devices=2")
    assert printed.status == 1
    # One process; on CPUs its replicas draw one after the other, as one device does.
    assert printed.rows["dp", "2"].verdict == "same"
    assert printed.rows["ddp", "2"].verdict == "differs"
    assert printed.rows["ddp", "2"].reason == reason
    assert printed.last == "2 of 3 runs are the same as one device, to 1e-06"


@pytest.mark.processes
def test_batch_norm_depends_on_the_devices_and_is_reported(parity: Parity) -> None:
    printed = parity(*TEACHER, "model=batch_norm", "--strategies=dp,ddp")
    assert printed.status == 1
    for strategy in ("dp", "ddp"):
        assert printed.rows[strategy, "1"].verdict == "same"
        split = printed.rows[strategy, "2"]
        assert split.verdict == "differs"
        assert split.reason == "BatchNorm: statistics of each replica or rank (network.1)"


@pytest.mark.processes
def test_a_loader_of_its_own_is_another_one_under_ddp_on_one_device(parity: Parity) -> None:
    own = ["data=own_loaders", "callbacks=unmonitored"]
    printed = parity(*own, "--strategies=ddp", "--devices=1")
    assert printed.rows["ddp", "1"].reason.startswith("a loader of its own gives")


@pytest.mark.processes
def test_draws_without_a_seed_are_told_from_a_split(parity: Parity) -> None:
    unseeded = ["data=noisy", "data.datasets.seeded=false", "callbacks=unmonitored"]
    printed = parity(*unseeded, "--strategies=dp", "--devices=1")
    assert printed.status == 1
    assert list(printed.rows) == [("one device again", "1"), ("dp", "1")]
    for row in printed.rows.values():
        assert (row.verdict, row.reason) == ("differs", IRREPRODUCIBLE)


@pytest.mark.processes
def test_a_short_run_is_compared_to_its_last_step(parity: Parity, tmp_path: Path) -> None:
    steps = ["--steps=3", "trainer.accumulate_grad_batches=2", "--keep=runs"]
    printed = parity(*TEACHER, *steps, "--strategies=dp", "--devices=2")
    assert printed.status == 0
    kept = torch.load(tmp_path / "runs" / "dp-2" / "recording.pt", weights_only=True)
    assert kept["losses"].shape == (6,)
    assert "rounding" not in kept["traits"], "float64 unless it is overridden"


@pytest.mark.processes
def test_a_failing_strategy_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "conf").symlink_to(CONF)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    # Lightning warns of this data, which has no validation, in every run.
    data = ["data=own_loaders", "callbacks=unmonitored"]
    arguments = [*LINEAR, *data, "--strategies=ddp,dp", "--devices=3"]
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.parity", *arguments],
        cwd=tmp_path,
        env=environment({"TMPDIR": str(scratch)}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    *lines, last = done.stdout.splitlines()
    rows = rows_of(lines)
    assert rows["ddp", "3"] == Row(
        "-",
        "-",
        "-",
        "failed",
        "data.global_batch_size must be positive and divisible by the number of processes; "
        "got 8 and 3. Use 6 or 9.",
    )
    assert rows["dp", "3"].verdict == "same"
    assert last == "2 of 3 runs are the same as one device, to 1e-06"
    progress = re.sub(r"[\d.]+ s", "N s", done.stderr).splitlines()
    assert progress == [
        "one device: what the others are compared with (N s)",
        "one device again, 1: same (N s)",
        "ddp, 3: failed (N s)",
        "dp, 3: same (N s)",
    ], "and nothing else"
    assert_no_orphans(str(tmp_path))
    assert list(scratch.glob("lockstep*")) == [], "the runs are gone"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conf", "scratch"]


@pytest.mark.processes
def test_the_documents_example_is_what_is_printed(
    parity: Parity, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    command = re.search(r"^python -m lockstep.parity (.*)$", text, re.MULTILINE)
    shown = re.search(r"```text\n(strategy .*?)```", text, re.DOTALL)
    assert command
    assert shown
    assert main(shlex.split(command[1])) == 1
    printed = capsys.readouterr().out
    # Another processor may round otherwise; what is wrong by a half is so everywhere.
    assert re.sub(r"\de-\d\d", "N", printed) == re.sub(r"\de-\d\d", "N", shown[1])
    assert "ddp               2        5e-01" in printed


@pytest.mark.processes
def test_without_a_run_on_one_device_there_is_no_table(
    parity: Parity, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunFailed, match=r"(?s)shapes cannot be multiplied.*--keep DIR leaves"):
        parity(*TEACHER, "model.network.in_features=11")
    assert capsys.readouterr().out == ""


def test_help_answers_without_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "lockstep.parity", "--help"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: python -m lockstep.parity")
    assert "the first 20 steps" in " ".join(done.stdout.split())
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "lockstep.parity.trial" in imported
    assert not imported & {"torch", "lightning", "numpy"}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--devices=1,x", "--devices: must be whole numbers from 1; got 'x'. Use for example 2."),
        ("--devices=0", "got '0'"),
        ("--steps=-1", "--steps: must be whole numbers from 1; got '-1'"),
        ("--tolerance=nan", "--tolerance: must be a number from 0; got 'nan'. Use for example"),
        ("--tolerance=tiny", "got 'tiny'"),
        ("--strategies=dpp", "got 'dpp'. Did you mean dp?"),
    ],
)
def test_a_wrong_option_names_rule_value_and_repair(
    parity: Parity, capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    with pytest.raises(SystemExit) as left:
        parity(option)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "override", ["trainer.strategy=ddp", "trainer.devices=2", "+trainer.devices=2", "strategy=ddp"]
)
def test_what_is_compared_is_no_override(parity: Parity, override: str) -> None:
    with pytest.raises(UsageError, match=r"got .*=.* Use --strategies dp,ddp and --devices 1,2"):
        parity(override)


def test_a_directory_without_conf_and_one_with_runs_are_refused(
    parity: Parity, tmp_path: Path
) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "something").touch()
    with pytest.raises(UsageError, match="--keep must be a new or empty directory; kept is not"):
        parity("--keep=kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["something"]
    (tmp_path / "conf").unlink()
    with pytest.raises(UsageError, match=r"conf/train.yaml must be in the current directory"):
        parity()


def values(*numbers: float, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    return {"values": torch.tensor(numbers, dtype=dtype)}


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        ((4.0, -8.0), (4.0, -8.5), 0.0625),
        ((4.0, -8.0), (4.0, -8.0), 0.0),
        ((), (), 0.0),
        ((0.0,), (0.0,), 0.0),
        ((1.0, math.nan), (1.5, math.nan), 0.5),
        ((1.0, math.inf), (1.5, math.inf), 0.5),
        ((1.0,), (math.nan,), math.inf),
        ((1.0,), (math.inf,), math.inf),
        ((1.0,), (1.0, 1.0), math.inf),
    ],
)
def test_a_difference_is_relative_to_the_largest_value(
    one: tuple[float, ...], other: tuple[float, ...], difference: float
) -> None:
    assert relative(values(*one), values(*other)) == difference


def test_differences_are_those_of_float64() -> None:
    one, other = values(1.0, dtype=torch.bfloat16), values(1.0 + 1e-12)
    assert relative(one, other) == pytest.approx(1e-12, rel=1e-3)
    large = {"a": torch.ones(1), "b": torch.full((1,), 100.0)}
    assert relative(large, large | {"a": torch.full((1,), 2.0)}) == 0.01, "of all, not of each"
    assert relative(values(1e-9), values(2e-9), smallest=0.01) == pytest.approx(1e-7)


def record(losses: tuple[float, ...] = (1.0, 0.5), world_size: int = 1, **traits: str) -> Record:
    steps = torch.tensor(losses, dtype=torch.float64)
    return Record(steps, {"w": torch.ones(2)}, {"test/loss": torch.ones(())}, traits, world_size)


@pytest.mark.parametrize(
    ("other", "devices", "reason"),
    [
        (record((1.0,), 2), 2, "1 steps instead of 2"),
        (record((1.0,), 1), 1, "1 steps instead of 2"),
        (record((0.25, 0.2), 4), 4, "the loss is a sum, DDP averages over ranks: use a mean (its"),
        (record((0.25, 0.2), 1), 4, UNKNOWN),
        (record((0.9, 0.5), 2, batchnorm="norm"), 2, "BatchNorm"),
        (record((0.9, 0.5), 1, batchnorm="norm"), 1, UNKNOWN),
        (record((0.9, 0.5), 1, draws="data"), 2, UNKNOWN),
        (record((0.9, 0.5), 2, rounding="bf16-mixed"), 2, ROUNDING.format("bf16-mixed")),
        (record((0.9, 0.5), 2, rounding="bf16-mixed", batchnorm="n"), 2, "BatchNorm"),
    ],
)
def test_a_reason_is_one_that_can_apply(other: Record, devices: int, reason: str) -> None:
    *_, verdict, told = Judge(record(), tolerance=1e-6, repeats=True)(other, devices)
    assert verdict == "differs"
    assert told.startswith(reason)


def test_the_tolerance_decides() -> None:
    other = record((1.0, 0.5001), world_size=2)
    assert Judge(record(), 1e-3, repeats=True)(other, 2)[-2:] == ("same", "")
    assert Judge(record(), 1e-5, repeats=True)(other, 2)[-2] == "differs"
