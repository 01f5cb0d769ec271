"""``python -m benchmarks.many_jobs [--jobs N] [--launcher slots]``: whether a long sweep grows.

Prints the launching process's memory after the tenth and the last job, and what a job costs early
and late; draws both over the jobs into ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil
from matplotlib.figure import Figure

from benchmarks.timing import PROJECT, arguments, environment, results_file

SETTLED = 10
"""Jobs after which nothing should grow."""
TRIVIAL = "trainer.max_epochs=1 data.datasets.train=64 data.datasets.val=32 data.datasets.test=32"
TICK_S = 0.05


@dataclass(frozen=True)
class Sample:
    """What was seen when ``jobs`` had ended."""

    jobs: int
    seconds: float
    parent_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.many_jobs", description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--launcher", choices=("basic", "slots"), default="basic")
    options = parser.parse_args()
    if options.jobs <= 2 * SETTLED:
        parser.error(f"--jobs must be more than {2 * SETTLED}; got {options.jobs}.")
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as scratch:
        samples = watch(options.jobs, options.launcher, Path(scratch))
    for line in findings(samples):
        print(line)
    print(f"drawn in {draw(samples, options.launcher).relative_to(PROJECT)}")


def watch(jobs: int, launcher: str, scratch: Path) -> list[Sample]:
    """Run the sweep; one sample per job, as its ``result.json`` says that it has finished."""
    command = f"python train.py -m hydra/launcher={launcher} 'seed=range({jobs})' {TRIVIAL}"
    print(command, flush=True)
    samples: list[Sample] = []
    running = set(map(str, range(jobs)))
    with (scratch / "output").open("w") as output:
        process = subprocess.Popen(
            arguments(command), cwd=scratch, env=environment(), stdout=output, stderr=output
        )
        parent, started = psutil.Process(process.pid), time.perf_counter()
        while process.poll() is None:
            time.sleep(TICK_S)
            ended = {path.parent.name for path in scratch.glob("multirun/*/*/*/result.json")}
            for name in sorted(ended & running):
                (path,) = scratch.glob(f"multirun/*/*/{name}/result.json")
                if json.loads(path.read_text())["status"] == "finished":
                    running.remove(name)
                    seconds = time.perf_counter() - started
                    memory = parent.memory_info().rss if parent.is_running() else 0
                    samples.append(Sample(jobs - len(running), seconds, memory))
    if process.returncode or running:
        sys.exit(f"{len(running)} jobs did not finish:\n{(scratch / 'output').read_text()[-2000:]}")
    return samples


def findings(samples: list[Sample]) -> list[str]:
    settled, last = samples[SETTLED - 1], samples[-1]
    each = [b.seconds - a.seconds for a, b in pairwise(samples)][SETTLED:]
    half = len(each) // 2
    growth = (last.parent_bytes - settled.parent_bytes) / (last.jobs - settled.jobs)
    return [
        f"parent: {settled.parent_bytes / 2**20:.1f} MB after job {settled.jobs}, "
        f"{last.parent_bytes / 2**20:.1f} MB after job {last.jobs}: {growth / 1024:.1f} kB a job",
        f"a job: {median(each[:half]):.2f} s in the first half, "
        f"{median(each[half:]):.2f} s in the second (medians)",
    ]


def draw(samples: list[Sample], launcher: str) -> Path:
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    memory, cost = figure.subplots(1, 2)
    jobs = [sample.jobs for sample in samples]
    memory.plot(jobs, [sample.parent_bytes / 2**20 for sample in samples])
    memory.set_ylabel("MB of the launching process")
    seconds = [b.seconds - a.seconds for a, b in pairwise(samples)]
    cost.plot(jobs[1:], seconds, ".")
    cost.set_ylabel("seconds a job")
    for axes in (memory, cost):
        axes.set_xlabel("jobs that have finished")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    path = results_file(f"many-jobs-{launcher}.png")
    figure.savefig(path, dpi=110)
    return path


if __name__ == "__main__":
    main()
