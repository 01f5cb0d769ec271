"""What a step and a run cost, in counts: calls, exchanges, files. Seconds are in benchmarks/."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, SMALL, Launch, environment, on
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import SimpleProfiler
from torch.utils.data import DataLoader

from lockstep.data.loader import ShardLoader
from lockstep.data.sharding import EvalShards, TrainShards
from lockstep.data.tensors import Tensors
from lockstep.overhead import EVALUATION_HOOKS, TRAINING_HOOKS, Unprofiled, trim

WHERE = [("auto", 1), ("ddp", 2)]
PER_STEP = {"all_reduce": 1}
"""Python's own collectives of a ddp step: the question whether somebody was asked to stop.
Gradients are exchanged below Python."""


class Silent(Callback):
    """Overrides no hook of a step."""


class Speaking(Silent):
    def on_before_zero_grad(self, *args: Any) -> None:
        """A hook that must go on being called."""


class Module(LightningModule):
    def on_after_backward(self) -> None:
        """A hook that must go on being called."""


def trainer_with(*callbacks: Callback, **arguments: Any) -> Trainer:
    return Trainer(
        callbacks=list(callbacks),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


def test_only_hooks_that_do_something_are_called() -> None:
    silent, speaking, module = Silent(), Speaking(), Module()
    trim(trainer_with(silent, speaking), module)
    assert all(getattr(silent, name) is None for name in TRAINING_HOOKS + EVALUATION_HOOKS)
    assert callable(speaking.on_before_zero_grad)
    assert speaking.on_after_backward is None
    assert callable(module.on_after_backward)
    assert module.on_before_zero_grad is None
    assert callable(module.on_test_batch_start), "Lightning reads its signature"


def test_what_was_left_out_survives_pickling_and_copying() -> None:
    silent, module = Silent(), Module()
    trim(trainer_with(silent), module)
    for again in (pickle.loads(pickle.dumps(silent)), copy.deepcopy(silent)):
        assert again.on_train_batch_end is None
    assert copy.deepcopy(module).on_before_zero_grad is None


def test_a_profiler_that_was_asked_for_stays() -> None:
    plain, profiled = trainer_with(), trainer_with(profiler="simple")
    for trainer in (plain, profiled):
        trim(trainer, Module())
    assert isinstance(plain.profiler, Unprofiled)
    assert isinstance(profiled.profiler, SimpleProfiler)


class Counting(Callback):
    """Counts what a run does in Python: logging and collectives; writes it on rank zero."""

    def __init__(self, path: str) -> None:
        self.path, self.counts = Path(path), Counter[str](frozen=gc.get_freeze_count())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._count(type(pl_module), "log")
        for name in ("all_reduce", "broadcast", "all_gather", "all_gather_object", "barrier"):
            self._count(torch.distributed, name)

    def _count(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            return original(*args, **kwargs)

        setattr(owner, name, counted)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.path.write_text(repr(dict(self.counts)))


def counts(launch: Launch, tmp_path: Path, devices: int, strategy: str, batch: int) -> Counter[str]:
    path = tmp_path / f"{strategy}-{batch}"
    launch(
        *SMALL,
        *on(strategy, devices),
        f"data.global_batch_size={batch}",
        f"+callbacks.counting={{_target_: test_overhead.Counting, path: '{path}'}}",
        sweep=True,
    )
    return Counter(eval(path.read_text()))


@pytest.mark.processes
@pytest.mark.parametrize(("strategy", "devices"), WHERE, ids=lambda value: str(value))
def test_steps_log_nothing_and_exchange_one_number(
    launch: Launch, tmp_path: Path, strategy: str, devices: int
) -> None:
    four, sixteen = (counts(launch, tmp_path, devices, strategy, size) for size in (16, 4))
    assert four["log"] == sixteen["log"] > 0, "self.log is called by the epoch"
    assert four["frozen"] == sixteen["frozen"] > 100_000, "objects of torch and Lightning"
    grown = {name: sixteen[name] - four[name] for name in sixteen}
    expected = {name: 12 * number for name, number in PER_STEP.items()} if devices > 1 else {}
    assert {name: number for name, number in grown.items() if number} == expected


def test_a_module_is_preloaded_once_and_the_collector_goes_on() -> None:
    program = """
import gc, sys
from lockstep.preload import preload
preload(("decimal", "fractions"))
frozen, kept = gc.get_freeze_count(), list(range(10))
preload(("decimal", "fractions"))
print(frozen > 1000, gc.get_freeze_count() == frozen, gc.isenabled(), "fractions" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True"] * 4


def test_a_fork_server_whose_parent_is_gone_leaves_while_it_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lockstep import forkserver

    left = threading.Event()
    seen: list[bool] = []
    monkeypatch.setattr(os, "_exit", lambda *_: left.set())
    monkeypatch.setattr(forkserver, "preload", lambda *_: seen.append(left.wait(60)))
    forkserver.preload_for(os.getpid())  # which is not the parent
    assert seen == [True]
    monkeypatch.setattr(forkserver, "preload", lambda *_: seen.append(left.wait(0.5)))
    left.clear()
    forkserver.preload_for(os.getppid())
    assert seen == [True, False]


def test_a_run_writes_the_same_files_whatever_its_length(launch: Launch, tmp_path: Path) -> None:
    listed = []
    for size in (64, 2):
        directory = tmp_path / f"batch{size}"
        launch(*SMALL, f"data.global_batch_size={size}", directory=directory)
        found = {path.relative_to(directory).as_posix() for path in directory.rglob("*.*")}
        listed.append({path for path in found if "step" not in path})
    assert listed[0] == listed[1]
    expected = {"result.json", "metrics.csv", "checkpoints/last.ckpt", ".hydra"}
    assert expected <= listed[0]
    assert len(listed[0]) < 10


@pytest.mark.parametrize("size", [1, 3, 32, 1000])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_batches_cut_from_memory_are_those_of_a_loader(
    monkeypatch: pytest.MonkeyPatch, size: int, world: int
) -> None:
    # Several cuts in one epoch.
    monkeypatch.setattr("lockstep.data.tensors.CHUNK_BYTES", 64)
    data = Tensors(torch.arange(100.0).unsqueeze(1), torch.arange(100))
    for rank in range(world):
        for sampler in (
            TrainShards(data, global_batch_size=size * world, rank=rank, world_size=world, seed=3),
            EvalShards(data, rank=rank, world_size=world),
        ):
            chosen: Any = {"batch_size": size, "sampler": sampler, "collate_fn": lambda rows: rows}
            cut, fetched = list(ShardLoader(data, **chosen)), list(DataLoader(data, **chosen))
            assert len(cut) == len(fetched)
            for mine, other in zip(cut, fetched, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_epoch_that_is_over_has_no_batch(rank: int) -> None:
    data = Tensors(torch.arange(9.0))
    sampler = TrainShards(data, global_batch_size=4, rank=rank, world_size=2, seed=0)
    sampler.skipped = sampler.steps
    assert list(ShardLoader(data, batch_size=2, sampler=sampler)) == []


def test_a_subclass_decides_what_a_sample_is() -> None:
    class Doubled(Tensors):
        def __getitems__(self, indices: Any) -> tuple[torch.Tensor, ...]:
            return tuple(2 * column for column in super().__getitems__(indices))

    data = Doubled(torch.ones(4))
    sampler = EvalShards(data, rank=0, world_size=1)
    (batch,) = ShardLoader(data, batch_size=4, sampler=sampler, collate_fn=lambda rows: rows)
    assert batch[0].tolist() == [2.0, 2.0, 2.0, 2.0]


def test_help_is_hydras_own_without_hydra_composing_anything() -> None:
    def said(*flags: str) -> str:
        done = subprocess.run(
            [sys.executable, "-X", "importtime", str(ROOT / "train.py"), *flags],
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        assert " torch\n" not in done.stderr
        return done.stdout

    assert said("--help") == said("-h") == said("--help", "seed=0")
