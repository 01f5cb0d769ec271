"""Run the project as a user does, in this process or as a command, and look at what it left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from slurm_cluster import cluster, project  # noqa: F401  (fixtures)

from lockstep.config import register
from lockstep.results import Result, read_result
from lockstep.strategies import replicas as dp

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
TEST_CONF = Path(__file__).parent / "conf"
TRAIN = [str(ROOT / "train.py"), "--config-dir", str(TEST_CONF)]
"""What Python, or a launcher, is given before the overrides."""
SMALL = [
    "data=indexed",
    "model=linear",
    "optimizer=sgd",
    "scheduler=none",
    "optimizer.lr=1e-6",
    "trainer.max_epochs=1",
]
"""64 training, 33 validation and 33 test samples whose targets are their indices."""


def on(strategy: str, devices: int | str = 2) -> list[str]:
    return [f"trainer.strategy={strategy}", f"trainer.devices={devices}"]


DDP2 = on("ddp")

register()
torch.set_num_threads(1)
pytest.register_assert_rewrite("contract", "dividing", "left", "watching")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")
    if not torch.cuda.is_available():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.fixture(params=["turns", "threads"])
def schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """CPU devices take turns; `threads` computes them at once, each from a thread, as GPUs are."""
    if request.param == "threads":
        monkeypatch.setattr(dp, "share_cores", lambda _: False)
    return request.param


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dp, "share_cores", lambda _: False)


def quick_and_slow(cases: list[Any], quick: list[Any]) -> list[Any]:
    """All cases as parameters of a test, those that are not ``quick`` marked slow."""
    assert all(case in cases for case in quick)
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases]


def compose_config(
    overrides: list[str], directory: Path, sweep: bool = False, name: str = "train"
) -> DictConfig:
    """The config of one job, with Hydra's own, as the command line would compose it."""
    mode = "MULTIRUN" if sweep else "RUN"
    settings = [
        f"hydra.searchpath=[file://{TEST_CONF}]",
        f"hydra.run.dir={directory}",
        f"hydra.sweep.dir={directory.parent}",
        f"hydra.mode={mode}",
    ]
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="train"):
        config = compose(name, [*settings, *overrides], return_hydra_config=True)
    GlobalHydra.instance().clear()
    OmegaConf.set_struct(config, False)
    OmegaConf.set_readonly(config.hydra, False)
    config.hydra.runtime.output_dir = str(directory)
    config.hydra.overrides.task = overrides
    config.hydra.mode = RunMode[mode]
    if sweep:
        config.hydra.job.num = 0
        config.hydra.job.id = "0"
    return config


Launch = Callable[..., Result]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Launch a run in or from this process; returns its ``result.json``.

    All launches of a test session share one fork server, so ranks start in milliseconds.
    """
    from lockstep.launch import launch as launch_run
    from lockstep.prepare import prepare

    count = 0

    def run(*overrides: str, sweep: bool = False, directory: Path | None = None) -> Result:
        nonlocal count
        directory = directory or tmp_path / f"run{count}"
        count += 1
        directory.mkdir(parents=True, exist_ok=True)
        config = compose_config(list(overrides), directory, sweep)
        HydraConfig.instance().set_config(config)
        composed = config.copy()
        del composed["hydra"]
        before = dict(os.environ)
        try:
            launch_run(prepare(composed))
        finally:
            HydraConfig.instance().cfg = None
            assert dict(os.environ) == before, "a run must leave the environment as it was"
        return read_result(directory / "result.json")

    return run


class Finished(subprocess.CompletedProcess[str]):
    """A finished ``python train.py``, with the result files that it left."""

    directory: Path
    seconds: float

    @property
    def results(self) -> list[Result]:
        paths = sorted(self.directory.glob("**/result.json"))
        return [read_result(path) for path in paths]


Command = Callable[..., Finished]
WARNING = re.compile(r"\.py:\d+: ")
"""The place that Python's warnings, and Lightning's of them, begin with."""


@pytest.fixture
def train(tmp_path: Path) -> Command:
    """Run ``python train.py`` with the project's own files, writing below ``tmp_path``.

    ``warns`` is what each warning says; none is expected by default. pytest's filters do not reach
    these processes.
    """

    def run(
        *arguments: str,
        env: dict[str, str] | None = None,
        launcher: list[str] | None = None,
        timeout: float = 120,
        warns: str | None = None,
    ) -> Finished:
        command = [*(launcher or [sys.executable]), *TRAIN, *arguments]
        started = time.monotonic()
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment(env),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        finished = Finished(command, done.returncode, done.stdout, done.stderr)
        finished.directory, finished.seconds = tmp_path, time.monotonic() - started
        assert_no_orphans(str(tmp_path))
        told = [line for line in done.stderr.splitlines() if WARNING.search(line)]
        assert [line for line in told if warns is None or warns not in line] == []
        return finished

    return run


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "", **(extra or {})}


def assert_no_orphans(directory: str, within_s: float = 5.0) -> None:
    """No process that works in ``directory`` is left: fork server, ranks, loader processes."""
    deadline = time.monotonic() + within_s
    while (left := processes_in(directory)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"left behind: {left}"


def processes_in(directory: str) -> list[dict[str, Any]]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == directory and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.as_dict(["pid", "ppid", "cmdline"]))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
