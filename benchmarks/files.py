"""``python -m benchmarks.files``: memory of a rank while the file grows ten times.

Trains Linear(64, 1) with ddp on two ranks from ``.npy`` files and from a Parquet table
of 50 and 500 MB, and prints the most anonymous memory (RssAnon) of any process of the run:
what a process holds that the system cannot drop. Mapped pages of a file (RssFile) are shown beside
it; the system drops them when it needs the room, so neither RSS nor USS, which count them, says
what a rank needs. Sampled every 50 ms: a shorter peak is not seen. Linux only.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

import numpy
import psutil
import pyarrow
from pyarrow import parquet

from benchmarks.timing import PROJECT, arguments, environment

FEATURES = 64
ROW_BYTES = 4 * (FEATURES + 1)
COMMON = (
    "python train.py model=linear model.network.in_features=64 data.global_batch_size=4096 "
    "trainer.max_epochs=1 trainer.strategy=ddp trainer.devices=2 trainer.accelerator=cpu "
    "optimizer=sgd optimizer.lr=0.01 scheduler=none callbacks=unmonitored test=false"
)
NAMES = [f"x{place}" for place in range(FEATURES)]


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.files", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=50, help="of the smaller file")
    smaller = parser.parse_args().megabytes
    print("data                  file, MB  anonymous, MB  mapped files, MB")
    for megabytes in (smaller, 10 * smaller):
        with tempfile.TemporaryDirectory(prefix="lockstep-bench-", dir=PROJECT) as scratch:
            directory, rows = Path(scratch), megabytes * 10**6 // ROW_BYTES
            for name, words in written(directory, rows).items():
                anonymous, mapped = peaks(f"{COMMON} {words}", directory)
                print(f"{name:20}  {megabytes:8}  {anonymous:13.0f}  {mapped:16.0f}", flush=True)


def written(directory: Path, rows: int) -> dict[str, str]:
    """The same numbers in two formats, and the words that read them."""
    draw = numpy.random.default_rng(0)
    x, y = (draw.standard_normal((rows, n), dtype="float32") for n in (FEATURES, 1))
    numpy.save(directory / "x.npy", x)
    numpy.save(directory / "y.npy", y)
    columns = {name: x[:, place] for place, name in enumerate(NAMES)} | {"y": y[:, 0]}
    parquet.write_table(pyarrow.table(columns), directory / "t.parquet", row_group_size=2**16)
    table = f"data=parquet data.datasets.path={directory / 't.parquet'} data.datasets.target=y"
    table += f" data.datasets.features=[{','.join(NAMES)}]"
    return {
        "npy": f"data=npy data.datasets.train=[{directory / 'x.npy'},{directory / 'y.npy'}]",
        "parquet, converting": table,
        "parquet, converted": table,
    }


def peaks(command: str, directory: Path) -> tuple[float, float]:
    """The most RssAnon and RssFile of any process that ``command`` starts, in MB."""
    with (directory / "said.txt").open("w") as said:
        running = subprocess.Popen(
            arguments(command), cwd=directory, env=environment(), stdout=said, stderr=said
        )
        most = (0.0, 0.0)
        while running.poll() is None:
            tree = [running.pid, *(p.pid for p in psutil.Process().children(recursive=True))]
            for pid in tree:
                most = tuple(map(max, most, held(pid)))
            time.sleep(0.05)
    if running.returncode:
        raise RuntimeError(f"{command} failed:\n{(directory / 'said.txt').read_text()[-2000:]}")
    return most


def held(pid: int) -> tuple[float, float]:
    """RssAnon and RssFile of a process in MB; 0 of one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0, 0.0
    facts = dict(line.split(":", 1) for line in lines)
    anonymous, mapped = (
        int(facts.get(name, "0 kB").split()[0]) / 1000 for name in ("RssAnon", "RssFile")
    )
    return anonymous, mapped


if __name__ == "__main__":
    main()
