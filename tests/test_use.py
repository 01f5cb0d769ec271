"""A trained model is tested, and predicts, as in its own run: anywhere, in data set order."""

# needs: image, text
from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import CONF, ROOT, SMALL, Launch, compose_config, environment, on
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException
from test_text import SMALL as TEXT

from lockstep.errors import UsageError
from lockstep.launch import launch as launch_run
from lockstep.results import Result, read_result
from lockstep.use.command import ON_ONE_CPU, MakeTask, offer_base, prepare
from lockstep.use.tasks import evaluation, exporting, prediction

pytestmark = pytest.mark.processes
Use = Callable[..., Result]
IMAGE = ["experiment=image/digits", "trainer.max_epochs=1", "data.datasets.test=0.03"]
MLP = ["model=mlp", "trainer.max_epochs=1", "data.datasets.train=128", "data.datasets.test=33"]


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Use:
    """One of the commands, in this process; returns its ``result.json``."""
    count = 0

    def run(make_task: MakeTask, *overrides: str) -> Result:
        nonlocal count
        directory = tmp_path / f"use{count}"
        count += 1
        directory.mkdir()
        monkeypatch.setattr(sys, "argv", ["eval.py", *overrides])
        offer_base("eval", CONF, ON_ONE_CPU if make_task is exporting else None)
        config = compose_config(list(overrides), directory, name="trained")
        HydraConfig.instance().set_config(config)
        composed = config.copy()
        del composed["hydra"]
        try:
            launch_run(prepare(composed, make_task))
        finally:
            HydraConfig.instance().cfg = None
            torch.set_num_threads(1)
        return read_result(directory / "result.json")

    return run


def table(path: Path) -> torch.Tensor:
    """The rows of a CSV file without its header, ``(samples, columns)``, index first."""
    with path.open(newline="") as file:
        _, *rows = csv.reader(file)
    return torch.tensor([[float(value) for value in row] for row in rows], dtype=torch.float64)


@pytest.mark.parametrize("model", [MLP, IMAGE, TEXT], ids=["mlp", "image", "text"])
def test_eval_and_predict_give_what_the_run_itself_gave(
    launch: Launch, use: Use, tmp_path: Path, model: list[str]
) -> None:
    trained = launch(*model, "predict=true")
    source = f"checkpoint={trained['directory']}"
    expected = torch.load(trained["predictions"], weights_only=True)
    for where in ((), on("ddp", 3)):
        tested = use(evaluation, source, *where)
        assert tested["task"] == f"testing {Path(trained['directory']).name}"
        names = [name for name in trained["metrics"] if name.startswith("test/")]
        assert list(tested["metrics"]) == names != []
        assert tested["samples_seen"] == {"test": trained["samples_seen"]["test"]}
        for name in names:
            same, other = (
                torch.tensor(result["metrics"][name], dtype=torch.float64)  # some are tables
                for result in (trained, tested)
            )
            torch.testing.assert_close(other, same, rtol=1e-6, atol=0)
        assert Path(tested["checkpoint"]).name.startswith("epoch"), "the best, not the last"
        output = tmp_path / f"{len(where)}.pt"
        assert use(prediction, source, f"output={output}", *where)["output"] == str(output)
        torch.testing.assert_close(torch.load(output, weights_only=True), expected)


def test_a_table_has_the_samples_in_order_and_every_bit(
    launch: Launch, use: Use, tmp_path: Path
) -> None:
    trained = launch(*MLP, "predict=true", "model.network.outputs=1")
    expected = torch.load(trained["predictions"], weights_only=True)
    for suffix, where in (("csv", "ddp"), ("parquet", "dp")):
        output = tmp_path / f"table.{suffix}"
        place = on(where)
        use(prediction, f"checkpoint={trained['directory']}", f"output={output}", *place)
        if suffix == "csv":
            rows = table(output)
        else:
            import pyarrow.parquet

            read = pyarrow.parquet.read_table(output)
            assert read.column_names == ["index", "prediction"]
            rows = torch.tensor([read["index"].to_pylist(), read["prediction"].to_pylist()]).T
        assert rows[:, 0].tolist() == list(range(33))
        # One rank or two make batches of other sizes, and other roundings: not bitwise here.
        torch.testing.assert_close(rows[:, 1].float(), expected[:, 0], rtol=1e-5, atol=1e-6)
    assert not list(tmp_path.glob("*.tmp"))


def test_columns_are_named_by_their_place_and_keep_float32() -> None:
    from lockstep.use.tables import columns

    values = torch.rand(4, 2, 2)
    found = columns({"scores": values, "pair": (torch.arange(4), torch.rand(4, 1).bfloat16())})
    assert list(found) == [
        "index",
        "prediction_scores_0_0",
        "prediction_scores_0_1",
        "prediction_scores_1_0",
        "prediction_scores_1_1",
        "prediction_pair_0",
        "prediction_pair_1",
    ]
    texts = found["prediction_scores_1_0"].astype(str)
    assert torch.equal(torch.tensor([float(text) for text in texts]), values[:, 1, 0])


def test_predictions_that_are_no_table_are_kept(tmp_path: Path) -> None:
    from lockstep.use.tables import write_table

    predictions = tmp_path / "predictions.pt"
    torch.save(torch.zeros(2, 10_001), predictions)
    with pytest.raises(UsageError, match="at most 10,000 columns; each prediction has 10,001"):
        write_table(predictions, tmp_path / "table.csv")
    assert list(tmp_path.iterdir()) == [predictions]
    write_table(predictions, predictions)
    assert torch.load(predictions, weights_only=True).shape == (2, 10_001)
    write_table(predictions, tmp_path / "table.pt")
    assert list(tmp_path.iterdir()) == [tmp_path / "table.pt"]


def test_the_runs_own_config_is_the_base_and_a_folder_replaces_what_it_names(
    launch: Launch, use: Use
) -> None:
    trained = launch(*SMALL, "data.datasets.test=7")
    source = f"checkpoint={trained['directory']}/checkpoints/last.ckpt"
    assert use(evaluation, source)["samples_seen"] == {"test": 7}
    assert use(evaluation, source, "data.datasets.test=9")["samples_seen"] == {"test": 9}
    # A batch that three processes cannot share is no reason to refuse an evaluation.
    ddp = ["strategy=ddp", "trainer.devices=3"]
    assert use(evaluation, source, *ddp)["world_size"] == 3
    # Of teacher's keys, noise and others are none of indexed: not one may be left.
    source = f"checkpoint={launch(*MLP)['directory']}"
    assert use(evaluation, source, "data=indexed")["samples_seen"] == {"test": 33}


def test_what_cannot_be_used_is_said(launch: Launch, use: Use, tmp_path: Path) -> None:
    run = Path(launch(*SMALL)["directory"])
    source = f"checkpoint={run}"

    def refused(match: str, *arguments: str, task: MakeTask = evaluation) -> None:
        with pytest.raises(UsageError, match=match):
            use(task, *arguments)

    refused("checkpoint must name a checkpoint")
    refused("nowhere is not there", f"checkpoint={tmp_path / 'nowhere'}")
    refused("has none that is whole", f"checkpoint={tmp_path}")
    weights = r"network.weight is \(1, 10\), of the network \(2, 10\)"
    refused(weights, source, "model.network.out_features=2")
    refused("needs a test set", source, "data=only_train")
    with pytest.raises(ConfigCompositionException, match="No match in the defaults list"):
        use(evaluation, source, "features=ema")  # as experiment=: it sets keys all over
    refused("needs a test or predict split", source, "data=only_train", task=prediction)
    taken = tmp_path / "taken.csv"
    taken.write_text("mine")
    refused("taken.csv exists", source, f"output={taken}", task=prediction)
    assert taken.read_text() == "mine"
    below_a_file = taken / "p.csv"
    refused("is a file. Use output=", source, f"output={below_a_file}", task=prediction)
    refused("must end in one of .csv, .parquet, .pt", source, "output=p.xls", task=prediction)
    torn = run / "checkpoints" / "torn.ckpt"
    torn.write_bytes((run / "checkpoints" / "last.ckpt").read_bytes()[:2000])
    refused("must be a whole checkpoint; it is damaged", f"checkpoint={torn}")
    alone = tmp_path / "alone.ckpt"
    alone.write_bytes((run / "checkpoints" / "last.ckpt").read_bytes())
    refused("must lie in the checkpoints/ of its run", f"checkpoint={alone}")


def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from lockstep.use import output

    monkeypatch.setattr(output, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"needs pyarrow, .* pip install -e '.\[parquet\]'"):
        output.output_file(
            tmp_path / "p.parquet", tmp_path, {".parquet": ("parquet", ("pyarrow",))}
        )


@pytest.mark.parametrize("name", ["eval", "predict", "export"])
def test_each_command_says_how_it_is_used(name: str) -> None:
    line = [sys.executable, str(ROOT / f"{name}.py"), "--help"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"python {name}.py checkpoint=" in done.stdout


def test_the_commands_read_the_runs_config_and_print_one_error(
    launch: Launch, tmp_path: Path
) -> None:
    run = launch(*MLP, "objective=test/mae")

    def command(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, str(ROOT / f"{name}.py"), *arguments]
        return subprocess.run(
            line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
        )

    source = f"checkpoint={run['directory']}"
    tested = command("eval", source, "hydra.run.dir=tested")
    assert (tested.returncode, tested.stderr) == (0, "")
    assert f"test/loss   {run['metrics']['test/loss']:.6g}" in tested.stdout
    written = command("predict", source, "output=rows.csv")
    assert (written.returncode, written.stderr) == (0, "")
    assert len(table(tmp_path / "rows.csv")) == 33
    assert re.search(r"^  rows +33$", written.stdout, re.MULTILINE)
    unnamed = command("predict", source, "hydra.run.dir=predicted")
    assert (unnamed.returncode, unnamed.stderr) == (0, "")
    assert sorted(path.name for path in (tmp_path / "predicted").iterdir()) == [
        ".hydra",
        "predict.log",
        "predictions.csv",
        "result.json",
    ]
    again = command("predict", source, "output=rows.csv")
    assert again.returncode == 1
    assert again.stderr.startswith("error: output must be a new file; ")
    typo = command("eval", source, "trainer.devises=2")
    assert typo.returncode == 1
    assert "Did you mean devices?" in typo.stderr
