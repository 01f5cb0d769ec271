"""Runs side by side: from files alone, whatever state they are in."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import SMALL, Command, environment
from left import table

from lockstep.errors import UsageError
from lockstep.report.files import as_text, write_report
from lockstep.report.reading import common_overrides, read_jobs, varied_keys
from lockstep.report.table import best_of, errors_of, rows_of
from lockstep.results import read_result

MEGABYTE = 2**20


def job(sweep: Path, name: int, overrides: str, speed: float = 100.0, **changed: Any) -> Path:
    """A run's files, as a finished run leaves them."""
    keys = dict(item.split("=", 1) for item in overrides.split())
    given = yaml.safe_load(keys.get("trainer.devices", "1"))
    devices = len(given) if isinstance(given, list) else given
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


def written(directory: Path) -> list[dict[str, str]]:
    return table(directory / "report.csv")


def test_varied_keys_are_columns_and_the_others_are_said_once(tmp_path: Path) -> None:
    job(tmp_path, 0, "model=mlp optimizer.lr=0.1 seed=1")
    job(tmp_path, 1, "model=mlp optimizer.lr=0.2 seed=1")
    jobs = read_jobs([tmp_path])
    assert varied_keys(jobs) == ["optimizer.lr"]
    assert common_overrides(jobs) == ["model=mlp", "seed=1"]


def test_what_a_run_was_not_told_is_what_its_config_says(tmp_path: Path) -> None:
    job(tmp_path, 0, "trainer.strategy=ddp trainer.devices=[0,1] model=linear compile=true")
    defaults = job(tmp_path, 1, "")
    (defaults / ".hydra").mkdir()
    config = {"trainer": {"strategy": "auto", "devices": 1}, "model": {"width": 8}, "compile": None}
    (defaults / ".hydra/config.yaml").write_text(yaml.safe_dump(config))
    keys = ("trainer.strategy", "trainer.devices", "model", "compile")
    rows = rows_of(read_jobs([tmp_path]))
    assert [rows[0].values[key] for key in keys] == ["ddp", "[0,1]", "linear", "true"]
    assert [rows[1].values[key] for key in keys] == ["auto", "1", None, None]


def test_speed_up_and_efficiency_are_against_one_device(tmp_path: Path) -> None:
    job(tmp_path, 0, "trainer.strategy=ddp trainer.devices=1", speed=100)
    job(tmp_path, 1, "trainer.strategy=ddp trainer.devices=2", speed=180)
    job(tmp_path, 2, "trainer.strategy=dp trainer.devices=4", speed=50)
    write_report([tmp_path], tmp_path)
    first, second, third = written(tmp_path)
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
    first, second = written(tmp_path)
    assert (float(first["test/loss"]), float(first["test/loss sd"])) == (2.0, pytest.approx(2**0.5))
    assert (float(second["test/loss"]), float(second["test/loss sd"])) == (5.0, 0.0)
    assert first["job"] == "0.. (2 seeds)"


def best(value: float, mode: str = "min", metric: str = "val/score") -> dict[str, Any]:
    return {"metric": metric, "mode": mode, "value": value, "checkpoint": "checkpoints/one.ckpt"}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("min", "best val/score: 2, at a checkpoint of #0.. (2 seeds) optimizer.lr=0.1"),
        ("max", "best val/score: 2.5, at a checkpoint of #2.. (2 seeds) optimizer.lr=0.2"),
    ],
)
def test_the_best_row_is_named_by_what_its_checkpoints_were_chosen_by(
    tmp_path: Path, mode: str, expected: str
) -> None:
    for name, (rate, seed, value) in enumerate(
        [(0.1, 1, 1.0), (0.1, 2, 3.0), (0.2, 1, 2.4), (0.2, 2, 2.6)]
    ):
        job(tmp_path, name, f"optimizer.lr={rate} seed={seed}", best=best(value, mode))
    job(tmp_path, 4, "optimizer.lr=0.3", status="failed", best=None)
    assert expected in write_report([tmp_path], tmp_path).splitlines()
    for name in ("report.md", "report.html"):
        assert expected in (tmp_path / name).read_text()


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (best(1.00005), "the same"),
        (best(2.0, metric="val/mae"), "chosen by another metric"),
        (best(2.0, mode="max"), "chosen the other way"),
        (None, "not chosen at all"),
    ],
)
def test_no_row_is_the_best_of_what_is(
    tmp_path: Path, other: dict[str, Any] | None, why: str
) -> None:
    job(tmp_path, 0, "optimizer.lr=0.1", best=best(1.0))
    job(tmp_path, 1, "optimizer.lr=0.2", best=other)
    assert best_of(rows_of(read_jobs([tmp_path]))) == "", why


@pytest.mark.parametrize(
    "key", ["data", "data.datasets.noise", "experiment", "model.loss._target_"]
)
def test_jobs_of_other_data_or_loss_have_no_best(tmp_path: Path, key: str) -> None:
    for name in (0, 1):
        job(tmp_path, name, f"optimizer.lr=0.1 {key}={name}", best=best(name + 1.0))
    assert best_of(rows_of(read_jobs([tmp_path]))) == ""


def test_the_best_is_named_by_what_it_was_given(tmp_path: Path) -> None:
    job(tmp_path, 0, "", best=best(1.0))
    job(tmp_path, 1, "model=cnn", best=best(2.0))
    assert best_of(rows_of(read_jobs([tmp_path]))).endswith(" at a checkpoint of #0")


def test_a_search_names_its_best_itself(tmp_path: Path) -> None:
    for name in (0, 1):
        job(tmp_path, name, f"optimizer.lr=0.{name + 1}", best=best(name + 1.0))
    assert best_of(rows_of(read_jobs([tmp_path]))).endswith("#0 optimizer.lr=0.1")
    (tmp_path / "search.json").write_text("{}")
    assert best_of(rows_of(read_jobs([tmp_path]))) == ""


def test_failed_torn_and_poor_results_are_rows(tmp_path: Path) -> None:
    job(tmp_path, 0, "seed=1")
    job(tmp_path, 1, "seed=2", status="failed", error="RuntimeError: broken\nsecond line")
    torn = job(tmp_path, 2, "seed=3") / "result.json"
    torn.write_text(torn.read_text()[: len(torn.read_text()) // 2])
    old = job(tmp_path, 3, "seed=4", samples_per_second_quartiles=None, peak_memory_bytes=[])
    (old / "metrics.csv").unlink()
    write_report([tmp_path], tmp_path)
    jobs = read_jobs([tmp_path])
    assert [row["status"] for row in written(tmp_path)] == ["finished", "failed", "unreadable"]
    failed, unreadable = errors_of(jobs)
    assert failed == "  #1  failed  seed=2  RuntimeError: broken"
    assert unreadable.startswith("  #2  unreadable")
    assert failed.strip() in (tmp_path / "report.md").read_text()


def test_a_torn_result_keeps_its_overrides_and_the_columns_of_the_others(tmp_path: Path) -> None:
    for name in range(4):
        job(tmp_path, name, f"model=mlp seed={name}")
    for name in ("2", "3"):
        (tmp_path / name / "result.json").write_text('{"status": "fin')
    (tmp_path / "2" / ".hydra").mkdir()
    (tmp_path / "2" / ".hydra" / "overrides.yaml").write_text("- model=mlp\n- seed=2\n")
    jobs = read_jobs([tmp_path])
    assert varied_keys(jobs) == ["seed"]
    assert common_overrides(jobs) == ["model=mlp"]
    known, unknown = errors_of(jobs)
    assert known.startswith("  #2  unreadable  model=mlp seed=2  ")
    assert unknown.startswith("  #3  unreadable")


@pytest.mark.parametrize("text", ["[]", "null", "1"])
def test_a_result_that_is_no_object_is_unreadable(tmp_path: Path, text: str) -> None:
    (job(tmp_path, 0, "seed=1") / "result.json").write_text(text)
    (read,) = read_jobs([tmp_path])
    assert (read.result["status"], read.finished) == ("unreadable", False)


def test_a_job_that_was_ended_before_its_result_is_listed(tmp_path: Path) -> None:
    job(tmp_path, 0, "seed=1")
    (tmp_path / "1" / ".hydra").mkdir(parents=True)
    (tmp_path / "1" / ".hydra" / "overrides.yaml").write_text("- seed=2\n")
    (line,) = errors_of(read_jobs([tmp_path]))
    assert line.startswith("  #1  no result  seed=2  it was ended before")


@pytest.mark.parametrize("cut", ["15,1,1.0,-", "15,1", "15,1,1.0,1.0,9", "15,1,1.0,1.0\n1,1,x,1.0"])
def test_a_history_ends_before_the_line_that_was_cut(tmp_path: Path, cut: str) -> None:
    path = job(tmp_path, 0, "seed=1") / "metrics.csv"
    path.write_text(f"step,epoch,seconds,train/loss\n7,0,0.5,2.0\n{cut}")
    (read,) = read_jobs([tmp_path])
    whole = [(15, 1.0, 1.0)] if "\n" in cut else []
    assert read.history == {"train/loss": [(7, 0.5, 2.0), *whole]}


def test_a_narrow_terminal_gets_the_columns_that_fit(tmp_path: Path) -> None:
    for name in range(2):
        job(tmp_path, name, f"seed={name} optimizer.lr=0.{name}")
    rows = rows_of(read_jobs([tmp_path]))
    *lines, last = as_text(rows, 60).splitlines()
    assert max(map(len, lines)) < 60
    assert lines[1].split() == ["0", "finished", "0", "0.0", "100", "(90-110)"]
    assert last == "  the terminal is too narrow for: " + ", ".join(
        ["first step s", "wall s", "MB a rank", "MB in all", "test/loss"]
    )
    whole = as_text(rows).splitlines()
    assert len(whole) == 3
    assert whole[0].split()[-1] == "test/loss"


def test_jobs_that_were_never_started_are_rows(tmp_path: Path) -> None:
    job(tmp_path, 0, "trainer.max_epochs=1 seed=3")
    job(tmp_path, 2, "trainer.max_epochs=1 seed=5 sweep.resume=latest")
    task = ["trainer.max_epochs=1", "seed=range(3,7)", "sweep.resume=latest"]
    sweeper = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
    plan = {"hydra": {"sweeper": {"_target_": sweeper}, "overrides": {"task": task}}}
    (tmp_path / "multirun.yaml").write_text(yaml.safe_dump(plan))
    assert errors_of(read_jobs([tmp_path])) == [
        "  #1  not started  trainer.max_epochs=1 seed=4",
        "  #3  not started  trainer.max_epochs=1 seed=6",
    ]
    plan["hydra"]["sweeper"] = {"_target_": "one.that.Searches"}
    (tmp_path / "multirun.yaml").write_text(yaml.safe_dump(plan))
    assert errors_of(read_jobs([tmp_path])) == []


def test_curves_name_their_jobs_by_what_varies(tmp_path: Path) -> None:
    from lockstep.report.plots import curves

    for name, rate in enumerate(("0.1", "0.2")):
        job(tmp_path, name, f"model=mlp optimizer.lr={rate}")
    figure = curves(read_jobs([tmp_path]))
    assert figure is not None
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["#0 lr=0.1", "#1 lr=0.2"]
    axes = figure.axes[0]
    assert (axes.get_ylabel(), axes.get_yscale()) == ("train/loss", "linear")


def test_a_loss_far_above_the_others_leaves_them_visible(tmp_path: Path) -> None:
    from lockstep.report.plots import curves

    job(tmp_path, 0, "optimizer.lr=0.1")
    far = job(tmp_path, 1, "optimizer.lr=10") / "metrics.csv"
    far.write_text("step,epoch,seconds,val/loss\n7,0,0.5,inf\n15,1,1.0,9000\n")
    figure = curves(read_jobs([tmp_path]))
    assert figure is not None
    axes = figure.axes[0]
    assert (axes.get_ylabel(), axes.get_yscale()) == ("train/loss or val/loss", "log")


def test_jobs_of_two_sweeps_are_never_one_row(tmp_path: Path) -> None:
    for sweep, loss in (("a", 1.0), ("b", 3.0)):
        for seed in (1, 2):
            losses = {"test/loss": loss + seed}
            job(tmp_path / sweep, seed, f"optimizer.lr=0.1 seed={seed}", metrics=losses)
    job(tmp_path / "c", 1, "optimizer.lr=0.1 seed=1", status="failed", error="x")
    rows = rows_of(read_jobs([tmp_path / name for name in "abc"]))
    assert [row.values["job"] for row in rows] == ["a/1.. (2 seeds)", "b/1.. (2 seeds)", "c/1"]
    assert [row.values.get("test/loss") for row in rows] == [2.5, 4.5, None]


def test_seeds_are_compared_one_by_one_though_some_failed(tmp_path: Path) -> None:
    for name, (devices, seed) in enumerate((d, s) for d in (1, 2) for s in (1, 2, 3)):
        keys = f"trainer.devices={devices} seed={seed}"
        changed: dict[str, Any] = {"status": "failed", "error": "x"} if name == 5 else {}
        speed = 100.0 * seed * devices
        job(tmp_path, name, keys, speed=speed, metrics={"test/loss": float(seed)}, **changed)
    one, two, failed = rows_of(read_jobs([tmp_path]))
    assert (one.values["agrees"], one.values.get("speed-up")) == (None, None)
    assert (two.values["agrees"], two.values["speed-up"], two.values["efficiency"]) == (True, 2, 1)
    assert failed.values["status"] == "failed"


def test_a_strategy_that_is_wrong_on_every_device_count_does_not_agree(tmp_path: Path) -> None:
    for name, (strategy, devices) in enumerate((s, d) for s in ("dp", "ddp") for d in (1, 2)):
        keys = f"trainer.strategy={strategy} trainer.devices={devices}"
        job(tmp_path, name, keys, metrics={"test/loss": 0.5 if strategy == "dp" else 0.9})
    agrees = [row.values["agrees"] for row in rows_of(read_jobs([tmp_path]))]
    assert agrees == [None, True, False, False]


def test_jobs_of_another_batch_are_compared_in_speed_alone(tmp_path: Path) -> None:
    job(tmp_path, 0, "trainer.devices=1")
    job(tmp_path, 1, "trainer.devices=2", speed=150, effective_batch_size=16, metrics={"a": 9.0})
    _, row = rows_of(read_jobs([tmp_path]))
    assert (row.values["speed-up"], row.values["agrees"]) == (1.5, None)


def test_devices_of_all_nodes_count(tmp_path: Path) -> None:
    job(tmp_path, 0, "trainer.devices=1 trainer.num_nodes=1", num_nodes=1)
    job(tmp_path, 1, "trainer.devices=2 trainer.num_nodes=2", speed=300, num_nodes=2)
    _, row = rows_of(read_jobs([tmp_path]))
    assert (row.values["speed-up"], row.values["efficiency"]) == (3, 0.75)


def test_scaling_is_a_line_per_strategy_and_other_varied_value(tmp_path: Path) -> None:
    from lockstep.report.plots import scaling

    for name, (rate, devices) in enumerate((r, d) for r in ("$a$", "$b") for d in (1, 2)):
        keys = f"trainer.strategy=ddp trainer.devices={devices} notes.a={rate} model=mlp"
        job(tmp_path, name, keys, speed=100 * (name + 1))
    figure = scaling(rows_of(read_jobs([tmp_path])))
    assert figure is not None
    measured = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    found = {line.get_label(): list(line.get_ydata()) for line in measured}
    assert found == {"ddp notes.a=$a$": [100, 200], "ddp notes.a=$b": [300, 400]}
    figure.canvas.draw()


def test_markdown_keeps_what_people_wrote_in_its_place(tmp_path: Path) -> None:
    job(tmp_path, 0, "notes.a=<b>|x")
    job(tmp_path, 1, "notes.a=c", status="failed", error="<i>boom")
    write_report([tmp_path], tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| &lt;b>\\|x |" in text
    assert "\n- #1  failed  notes.a=c  &lt;i>boom\n" in text


@pytest.mark.parametrize("durations", [(0.1, 1.0), (0.1, 0.5), (1.0, 1.0, 3.0)])
def test_quartiles_of_the_speed_lie_within_the_steps(durations: tuple[float, ...]) -> None:
    from lockstep.callbacks.step_clock import StepClock

    clock = StepClock()
    clock._ends.extend(accumulate((0.0, *durations)))
    low, high = clock.measured(0.0, 8)["samples_per_second_quartiles"]
    assert 8 / max(durations) <= low <= high <= 8 / min(durations)


def test_a_report_that_cannot_be_printed_is_told_and_hides_no_result(tmp_path: Path) -> None:
    for seed in (1, 2):
        job(tmp_path, seed, f"seed={seed}")
    code = (
        "import sys; from pathlib import Path; from lockstep import sweep, report\n"
        "from lockstep.report import files\n"
        "files.write_report = lambda *_: chr(0xb1)\n"
        "sweep.RememberSweep.directory = Path(sys.argv[1]); sweep.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment({"PYTHONIOENCODING": "ascii"}),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "the report could not be written: UnicodeEncodeError" in done.stdout
    assert "2 finished" in done.stdout


def test_several_sweeps_are_one_report(tmp_path: Path) -> None:
    job(tmp_path / "a", 0, "optimizer.lr=0.1")
    job(tmp_path / "b", 0, "optimizer.lr=0.2")
    command = [sys.executable, "-m", "lockstep.report", "a", "b", "--into", "both"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [row["optimizer.lr"] for row in written(tmp_path / "both")] == ["0.1", "0.2"]


def test_a_reader_that_has_enough_ends_nothing(tmp_path: Path) -> None:
    for name in range(600):  # more than a pipe holds
        job(tmp_path, name, f"optimizer.lr=0.{name} notes={'x' * 100}")
    command = [sys.executable, "-m", "lockstep.report", str(tmp_path)]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert (process.stderr.read(), process.wait(100)) == ("", 0)


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
    assert not re.findall(r"https?://", page)
    assert page.count("<svg") >= 1


def test_the_ring_and_the_root_are_drawn_from_the_measured_bytes(tmp_path: Path) -> None:
    from lockstep.report.plots import exchange

    for name, devices in enumerate((1, 2, 4)):
        sent = round(2 * (devices - 1) / devices * 1000)
        keys = f"trainer.strategy=ddp trainer.devices={devices}"
        job(tmp_path, name, keys, exchanged_bytes_per_step=sent, gradient_bytes=1000)
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
    assert "pip install 'lockstep[plots]'" in done.stdout
    assert (tmp_path / "report.html").exists()


@pytest.mark.processes
def test_a_sweep_ends_with_its_report(train: Command) -> None:
    done = train("-m", *SMALL, "trainer.strategy=dp,ddp", "trainer.devices=1,2", "compare=true")
    assert done.returncode == 0, done.stderr
    (sweep,) = (path.parent for path in done.directory.glob("multirun/*/*/report.html"))
    rows = written(sweep)
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
    assert [row["agrees"] for row in rows] == ["", "True", "True", "True"]
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
