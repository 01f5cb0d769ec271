"""Runs side by side: from files alone, whatever state they are in."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL, Command, environment

from lockstep.errors import UsageError
from lockstep.report.files import write_report
from lockstep.report.reading import common_overrides, read_jobs, varied_keys
from lockstep.report.table import errors_of, rows_of
from lockstep.results import read_result

MEGABYTE = 2**20


def job(sweep: Path, name: int, overrides: str, speed: float = 100.0, **changed: Any) -> Path:
    """A run's files, as a finished run leaves them."""
    keys = dict(item.split("=", 1) for item in overrides.split())
    devices = int(keys.get("trainer.devices", 1))
    result = {
        "status": "finished",
        "strategy": keys.get("trainer.strategy", "auto"),
        "devices": devices,
        "effective_batch_size": 8,
        "overrides": overrides.split(),
        "samples_per_second": speed,
        "samples_per_second_quartiles": [speed - 10, speed + 10],
        "time_to_first_step_s": 1.0,
        "wall_time_s": 2.0,
        "peak_memory_bytes": [100 * MEGABYTE] * devices,
        "metrics": {"test/loss": 0.5},
        **changed,
    }
    directory = sweep / str(name)
    directory.mkdir(parents=True)
    (directory / "result.json").write_text(json.dumps(result))
    lines = ["step,epoch,seconds,train/loss", "7,0,0.5,2.0", "15,1,1.0,1.0"]
    (directory / "metrics.csv").write_text("\n".join(lines) + "\n")
    return directory


def table(directory: Path) -> list[dict[str, str]]:
    with (directory / "report.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_varied_keys_are_columns_and_the_others_are_said_once(tmp_path: Path) -> None:
    job(tmp_path, 0, "model=mlp optimizer.lr=0.1 seed=1")
    job(tmp_path, 1, "model=mlp optimizer.lr=0.2 seed=1")
    jobs = read_jobs([tmp_path])
    assert varied_keys(jobs) == ["optimizer.lr"]
    assert common_overrides(jobs) == ["model=mlp", "seed=1"]


def test_speed_up_and_efficiency_are_against_one_device(tmp_path: Path) -> None:
    job(tmp_path, 0, "trainer.strategy=ddp trainer.devices=1", speed=100)
    job(tmp_path, 1, "trainer.strategy=ddp trainer.devices=2", speed=180)
    job(tmp_path, 2, "trainer.strategy=dp trainer.devices=4", speed=50)
    write_report([tmp_path], tmp_path)
    first, second, third = table(tmp_path)
    assert first["speed-up"] == ""
    assert (float(second["speed-up"]), float(second["efficiency"])) == (1.8, 0.9)
    assert (float(third["speed-up"]), float(third["efficiency"])) == (0.5, 0.125)
    assert (float(second["MB a rank"]), float(second["MB in all"])) == (100, 200)
    assert (float(second["quarter below"]), float(second["quarter above"])) == (170, 190)


def test_a_metric_that_depends_on_the_split_is_marked(tmp_path: Path) -> None:
    job(tmp_path, 0, "trainer.devices=1 optimizer.lr=0.1")
    job(tmp_path, 1, "trainer.devices=2 optimizer.lr=0.1", metrics={"test/loss": 0.50001})
    job(tmp_path, 2, "trainer.devices=2 optimizer.lr=0.2", metrics={"test/loss": 0.7})
    job(tmp_path, 3, "trainer.devices=1 optimizer.lr=0.2", metrics={"test/loss": 0.8})
    agrees = [row.values.get("agrees") for row in rows_of(read_jobs([tmp_path]))]
    assert agrees == [None, True, False, None]
    text = write_report([tmp_path], tmp_path)
    assert re.search(r"2 +finished .* NO ", text)


def test_repeats_over_the_seed_are_mean_and_spread(tmp_path: Path) -> None:
    for name, (rate, seed, loss) in enumerate(
        [(0.1, 1, 1.0), (0.1, 2, 3.0), (0.2, 1, 5.0), (0.2, 2, 5.0)]
    ):
        job(tmp_path, name, f"optimizer.lr={rate} seed={seed}", metrics={"test/loss": loss})
    write_report([tmp_path], tmp_path)
    first, second = table(tmp_path)
    assert (float(first["test/loss"]), float(first["test/loss sd"])) == (2.0, pytest.approx(2**0.5))
    assert (float(second["test/loss"]), float(second["test/loss sd"])) == (5.0, 0.0)
    assert first["job"] == "0.. (2 seeds)"


def test_failed_torn_and_poor_results_are_rows(tmp_path: Path) -> None:
    job(tmp_path, 0, "seed=1")
    job(tmp_path, 1, "seed=2", status="failed", error="RuntimeError: broken\nsecond line")
    torn = job(tmp_path, 2, "seed=3") / "result.json"
    torn.write_text(torn.read_text()[: len(torn.read_text()) // 2])
    old = job(tmp_path, 3, "seed=4", samples_per_second_quartiles=None, peak_memory_bytes=[])
    (old / "metrics.csv").unlink()
    write_report([tmp_path], tmp_path)
    jobs = read_jobs([tmp_path])
    assert [row["status"] for row in table(tmp_path)] == ["finished", "failed", "unreadable"]
    failed, unreadable = errors_of(jobs)
    assert failed == "  #1  failed  seed=2  RuntimeError: broken"
    assert unreadable.startswith("  #2  unreadable")
    assert failed.strip() in (tmp_path / "report.md").read_text()


def test_several_sweeps_are_one_report(tmp_path: Path) -> None:
    job(tmp_path / "a", 0, "optimizer.lr=0.1")
    job(tmp_path / "b", 0, "optimizer.lr=0.2")
    command = [sys.executable, "-m", "lockstep.report", "a", "b", "--into", "both"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [row["optimizer.lr"] for row in table(tmp_path / "both")] == ["0.1", "0.2"]


def test_a_directory_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no result.json. Look in multirun/"):
        read_jobs([tmp_path])
    command = [sys.executable, "-m", "lockstep.report", str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: A report needs directories of runs or sweeps;")


def test_the_page_needs_nothing_but_itself_and_escapes_what_people_wrote(tmp_path: Path) -> None:
    job(tmp_path, 0, "notes.a=<script>alert(1)</script>")
    job(tmp_path, 1, "notes.a=b", status="failed", error="<b>bold & bad</b>")
    write_report([tmp_path], tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "&lt;b&gt;bold &amp; bad" in page
    assert not re.findall(r"(?:src|href)=[\"'](?!#)", page), "nothing is fetched"
    assert "url(http" not in page
    assert page.count("<svg") >= 1


def test_the_ring_and_the_root_are_drawn_from_the_measured_bytes(tmp_path: Path) -> None:
    from lockstep.report.plots import exchange

    for name, devices in enumerate((1, 2, 4)):
        sent = round(2 * (devices - 1) / devices * 1000)
        keys = f"trainer.strategy=ddp trainer.devices={devices}"
        job(tmp_path, name, keys, exchanged_bytes_per_step=sent)
    figure = exchange(rows_of(read_jobs([tmp_path])))
    assert figure is not None
    root, ring, measured = figure.axes[0].lines
    assert list(root.get_ydata())[:4] == [0, 2000, 4000, 6000]
    assert list(ring.get_ydata())[:4] == pytest.approx([0, 1000, 4000 / 3, 1500])
    assert list(measured.get_ydata()) == [1000, 1500]


def test_without_matplotlib_the_tables_are_written_and_the_extra_is_named(tmp_path: Path) -> None:
    job(tmp_path, 0, "seed=1")
    hide = "import sys; sys.modules['matplotlib'] = None; sys.modules['matplotlib.figure'] = None\n"
    code = f"{hide}from lockstep.report.__main__ import main; sys.exit(main(['.']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "no plots: matplotlib" in done.stdout
    assert "pip install 'lockstep[report]'" in done.stdout
    assert (tmp_path / "report.html").exists()


@pytest.mark.processes
def test_a_sweep_ends_with_its_report(train: Command) -> None:
    done = train("-m", *SMALL, "trainer.strategy=dp,ddp", "trainer.devices=1,2", "compare=true")
    assert done.returncode == 0, done.stderr
    (sweep,) = (path.parent for path in done.directory.glob("multirun/*/*/report.html"))
    rows = table(sweep)
    assert [(row["trainer.strategy"], row["trainer.devices"]) for row in rows] == [
        ("dp", "1"),
        ("dp", "2"),
        ("ddp", "1"),
        ("ddp", "2"),
    ]
    for row in rows:
        result = read_result(sweep / row["job"] / "result.json")
        assert float(row["samples/s"]) == result["samples_per_second"]
        assert float(row["test/loss"]) == result["metrics"]["test/loss"]
    assert [row["agrees"] for row in rows] == ["", "True", "", "True"]
    assert float(rows[3]["exchanged bytes"]) == (10 + 1) * 4
    for name in ("report.md", "report-curves.png", "report-scaling.png", "report-exchange.png"):
        assert (sweep / name).stat().st_size > 100
    assert f"report: {sweep.relative_to(done.directory) / 'report.html'}" in done.stdout


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize(("scheme", "paper"), [("0", (13, 17, 23)), ("1", (255, 255, 255))])
def test_a_browser_shows_the_page_in_light_and_dark(
    tmp_path: Path, scheme: str, paper: tuple[int, int, int]
) -> None:
    from matplotlib.image import imread

    job(tmp_path, 0, "trainer.devices=1")
    job(tmp_path, 1, "trainer.devices=2", speed=150)
    write_report([tmp_path], tmp_path)
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--blink-settings=preferredColorScheme={scheme}",
        "--window-size=1000,800",
        f"--screenshot={tmp_path / 'shot.png'}",
        f"file://{tmp_path / 'report.html'}",
    ]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, timeout=60)
    picture = imread(tmp_path / "shot.png")[..., :3]
    assert picture.shape[:2] == (800, 1000)
    assert tuple((picture[2, 2] * 255).round().astype(int)) == paper
    assert picture.std() > 0.05, "text, table and plots are on it"
