"""What is read while two commands run, or from what they leave: first steps, steps, memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.ours import CONF, TRAINING, step_s
from benchmarks.timing import PROJECT, arguments, completed, environment

MB = 2**20
STEPS = 12
DATA = {"resnet18": "bench_images", "transformer": "bench_texts"}
BY_HAND = "torchrun --nproc-per-node=2 by_hand.py"
TRAIN = [sys.executable, str(PROJECT / "train.py"), "--config-dir", str(CONF)]
STAMPED = "callbacks=bench_stamped"
TICK_S = 0.05
Found = dict[str, float]


def ddp_beside(network: str, directory: Path) -> tuple[Found, Found]:
    """``step_s``, ``first_step_s`` (since the command was given) and ``peak_memory_bytes`` of rank
    zero: ours, and the documents' script's."""
    directory.mkdir(parents=True)
    script = [*arguments(BY_HAND), network, "--steps", str(STEPS), "--into", str(directory)]
    started = run(script, directory)
    theirs: Found = json.loads((directory / "by_hand.json").read_text())
    theirs["first_step_s"] = theirs.pop("first_step") - started
    chosen = [f"data={DATA[network]}", f"model=bench_{network}"]
    where = ["trainer.strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu"]
    run_directory = directory / "run"
    ours = [*TRAIN, *TRAINING, *chosen, *where, STAMPED, f"hydra.run.dir={run_directory}"]
    started = run(ours, directory)
    result = read(run_directory / "result.json")
    return {
        "step_s": step_s(result),
        "first_step_s": float((run_directory / "first_step").read_text()) - started,
        "peak_memory_bytes": result["peak_memory_bytes"][0],
    }, theirs


def first_step_s(directory: Path) -> float:
    """From ``python train.py`` to the end of its first step."""
    started = run([*TRAIN, STAMPED, f"hydra.run.dir={directory}"], directory.parent)
    return float((directory / "first_step").read_text()) - started


def memory_while_running(directory: Path) -> tuple[float, float]:
    """Bytes: the most that the launching process of a ddp run holds, and ``import torch``."""
    directory.mkdir(parents=True)
    where = ["trainer.strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu"]
    ours = watched([*TRAIN, *where, f"hydra.run.dir={directory / 'run'}"], directory)
    wait = f"import torch, time; time.sleep({20 * TICK_S})"
    return ours, watched([sys.executable, "-c", wait], directory)


def watched(command: list[str], directory: Path) -> float:
    """The largest resident set of one process, its children left out."""
    process = subprocess.Popen(command, cwd=directory, env=environment(), stdout=subprocess.DEVNULL)
    seen, most = psutil.Process(process.pid), 0
    while process.poll() is None:
        try:
            most = max(most, seen.memory_info().rss)
        except psutil.NoSuchProcess:
            break
        time.sleep(TICK_S)
    if process.wait():
        raise RuntimeError(f"{' '.join(command)} failed")
    return most


def run(command: list[str], directory: Path) -> float:
    """Run it in one thread a process; returns when it was started, in seconds since 1970."""
    started = time.time()
    completed(command, directory, threads=1)
    return started


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found
