"""docs/from-the-documents.md: the tutorials' code does what the page says, and so does ours."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, Command, Launch, on
from left import column
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data.distributed import DistributedSampler
from tutorial_blocks import PAGE, blocks, run

from lockstep.data.sharding import EvalShards, TrainShards
from lockstep.data.synthetic import standard_normal

TEXT = PAGE.read_text()
COMMANDS = [
    line
    for kind, block in re.findall(r"```(\w*)\n(.*?)```", TEXT, flags=re.DOTALL)
    if not kind
    for line in block.splitlines()
]
TRAIN = [
    shlex.split(line)[2:] for line in COMMANDS if line.startswith("python train.py experiment")
]
DATA_PARALLEL, FOUR_STEPS, SIMPLE, *_ = blocks()


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of two processes saw of the three blocks that need two."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "tutorial_blocks.py")],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    seen: list[dict[str, Any]] = json.loads(done.stdout)
    return seen


def losses(lines: list[str]) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in lines]


def printed_by_ranks(directory: Path) -> str:
    return (directory / "train.log").read_text()


def test_every_marked_fault_has_a_test() -> None:
    marked = re.findall(r"\*\*F(\d+)\*\*", TEXT)
    tested = re.findall(r"^def test_f(\d+)_", Path(__file__).read_text(), re.MULTILINE)
    assert set(tested) == set(marked) == {str(number) for number in range(1, 11)}


def test_every_file_that_a_line_becomes_exists() -> None:
    named = re.findall(r"`((?:src|conf|tests)/[\w/.]+)`", TEXT)
    assert len(named) > 15
    assert not [name for name in named if not (ROOT / name).exists()]


def test_f1_a_module_has_no_method_that_wraps_it() -> None:
    with pytest.raises(AttributeError, match="no attribute 'DataParallel'"):
        run(DATA_PARALLEL, {})


def test_f2_the_argument_is_misspelt() -> None:
    wrap = FOUR_STEPS[FOUR_STEPS.index("model = torch.nn.parallel") :]
    with pytest.raises(TypeError, match="output_devie"):
        run(wrap, {"torch": torch, "model": nn.Linear(10, 1), "local_rank": 0})


def test_f4_the_class_has_no_device() -> None:
    names: dict[str, Any] = {}
    with pytest.raises(AttributeError, match="DataParallel"):
        run(DATA_PARALLEL, names)
    with pytest.raises((AttributeError, TypeError)):
        run("model.to(device)", {**names, "device": torch.device("cpu")})
    names["net"].to("cpu")


def test_f3_the_rank_is_not_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    try:
        assert dist.get_rank() == 2, "first process of the second machine, which has GPUs 0 and 1"
    finally:
        dist.destroy_process_group()
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert TorchElasticEnvironment().local_rank() == 0


def test_f5_the_sampler_alone_repeats_its_order_and_its_samples() -> None:
    five = torch.arange(5)
    samplers = [DistributedSampler(five, num_replicas=2, rank=rank) for rank in (0, 1)]
    first, second = ([list(sampler) for sampler in samplers] for _ in range(2))
    assert first == second, "the same order in each epoch"
    assert sum(map(len, first)) == 6
    ours = [EvalShards(five, rank=rank, world_size=2) for rank in (0, 1)]
    assert sorted(index for shard in ours for index in shard) == list(range(5))
    shard = TrainShards(torch.arange(90), global_batch_size=30, rank=0, world_size=2, seed=0)
    epochs = []
    for epoch in (0, 1):
        shard.set_epoch(epoch)
        epochs.append(list(shard))
    assert epochs[0] != epochs[1]


@pytest.mark.processes
def test_the_dataparallel_block_gives_the_losses_of_our_run(launch: Launch, tmp_path: Path) -> None:
    data = standard_normal(samples=100, features=10, targets=1).train
    inputs, targets = data[:]
    given = SIMPLE.replace("torch.randn(100, 10)", "INPUTS")
    given = given.replace("torch.randn(100, 1)", "TARGETS")
    torch.manual_seed(0)
    theirs = losses(run(given, {"INPUTS": inputs, "TARGETS": targets}))
    assert len(theirs) == 10
    for number, strategy in enumerate((1, "dp", "ddp")):
        options = [] if strategy == 1 else on(strategy)
        command = ["experiment=tutorial/simple_model", *options]
        assert command in TRAIN
        directory = tmp_path / f"run{number}"
        launch(*command, directory=directory)
        assert column(directory, "train/loss") == pytest.approx(theirs, rel=1e-6)


@pytest.mark.processes
def test_f6_each_process_draws_samples_of_its_own(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["ddp"] for rank in ranks)
    assert first["first input"] != second["first input"]
    assert first["weight"] == second["weight"], "gradients are exchanged all the same"


@pytest.mark.processes
def test_f7_each_process_prints_a_loss_of_its_own(ranks: list[dict[str, Any]]) -> None:
    first, second = (losses(rank["ddp"]["printed"]) for rank in ranks)
    assert len(first) == len(second) == 10
    assert all(one != other for one, other in zip(first, second, strict=True))


@pytest.mark.processes
def test_f8_the_bare_module_drifts_apart(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["short"] for rank in ranks)
    assert first["mode"] == second["mode"], "the wrapped module's gradients are averaged"
    assert first["model"] != second["model"]


@pytest.mark.processes
def test_f9_a_batch_of_30_is_60_on_two_processes(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        outside = [line for line in rank["whole"]["printed"] if line.startswith("Outside")]
        assert outside == [
            f"Outside: input size torch.Size([{size}, 5]) output_size torch.Size([{size}, 2])"
            for size in (30, 15)
        ]


@pytest.mark.processes
def test_f10_a_sample_is_another_on_each_rank(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["whole"]["sample 7"] for rank in ranks)
    assert first != second


@pytest.mark.processes
@pytest.mark.parametrize(
    "arguments",
    [command for command in TRAIN if "simple_model" not in command[0]],
    ids=lambda arguments: " ".join(arguments),
)
def test_each_command_prints_what_the_page_says(
    launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture, arguments: list[str]
) -> None:
    caplog.set_level("INFO")
    result = launch(*arguments, directory=tmp_path)
    assert result["status"] == "finished"
    log = caplog.text if arguments[1] == "trainer.strategy=dp" else printed_by_ranks(tmp_path)
    if "random_dataset" in arguments[0]:
        assert result["steps"] == 3
        assert re.findall(r"in (?:replica|rank) \d: input (\S+ \S+),", log) == ["[15, 5]"] * 6
    else:
        assert result["steps"] == 160


@pytest.mark.slow
@pytest.mark.processes
def test_torchrun_and_the_sweep_give_the_same(train: Command) -> None:
    (torchrun,) = [shlex.split(line) for line in COMMANDS if line.startswith("torchrun")]
    at = torchrun.index("train.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", *torchrun[1:at]]
    one = train(*torchrun[at + 1 :], launcher=launcher)
    assert one.returncode == 0, one.stderr
    (result,) = one.results
    assert (result["world_size"], result["steps"]) == (2, 3)
    (sweep,) = [shlex.split(line)[2:] for line in COMMANDS if "compare=true" in line]
    done = train(*sweep)
    assert done.returncode == 0, done.stderr
    jobs = [job for job in done.results if job["directory"] != result["directory"]]
    found = [job["metrics"]["train/loss"] for job in jobs]
    assert len(found) == 4
    assert found == pytest.approx([found[0]] * 4, rel=1e-5)
