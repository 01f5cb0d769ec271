"""``plots=true``: what the pictures show, on one process and two, and where they end up."""

# needs: image, text
from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DDP2, ROOT, Command, Launch
from logged import wandb_records
from matplotlib.image import imread

from lockstep.pictures import draw
from lockstep.results import Result

pytestmark = pytest.mark.processes


def pixels(result: Result, name: str) -> Any:
    return imread(Path(result["directory"]) / f"{name}.png")


def assert_same_picture(one: Result, two: Result, name: str) -> None:
    """Rounding may shift the edge of a line by a shade; a dot or a word elsewhere is far more."""
    first, second = pixels(one, name), pixels(two, name)
    assert first.shape == second.shape
    differ = (abs(first - second) > 0.1).any(axis=-1)
    assert differ.mean() < 1e-4, f"{name}: {differ.sum()} pixels"


def test_the_dots_are_the_predictions_of_the_test_in_its_order_also_of_two_ranks(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[torch.Tensor, torch.Tensor]] = []
    numbers = draw.numbers
    monkeypatch.setattr(draw, "numbers", lambda p, t: drawn.append((p, t)) or numbers(p, t))
    overrides = ["plots=true", "trainer.max_epochs=2"]
    single = launch(*overrides, "predict=true")
    ((predicted, target),) = drawn
    expected = torch.load(single["predictions"], weights_only=True)[: draw_limit(predicted)]
    assert torch.equal(predicted, expected.reshape(-1))
    error = torch.nn.functional.l1_loss(predicted, target)
    assert float(error) == pytest.approx(single["metrics"]["test/mae"], rel=1e-5)
    spread = launch(*overrides, *DDP2, "logger=every")
    for name in ("curves", "samples"):
        assert_same_picture(single, spread, name)
    split = launch(*overrides, "strategy=tensor_parallel", "trainer.devices=2")
    assert_same_picture(single, split, "samples")  # each of its ranks has every sample
    assert not (Path(single["directory"]) / "confusion.png").exists(), "these are no classes"
    assert_in_each_logger(Path(spread["directory"]), {"curves", "samples"})


def draw_limit(predicted: torch.Tensor) -> int:
    from lockstep.pictures.samples import NUMBERS

    assert len(predicted) <= NUMBERS
    return NUMBERS


def assert_in_each_logger(run: Path, names: set[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert set(events.Tags()["images"]) == {f"pictures/{name}" for name in names}
    (path,) = run.glob("wandb/offline-run-*/run-*.wandb")
    items = [r["history"]["item"] for r in wandb_records(path) if r["type"] == "history"]
    assert {f"pictures/{name}" for name in names} <= {
        key.partition(".")[0] for item in items for key in item
    }
    for name in names:
        copies = list(run.parent.glob(f"artifacts/*/artifacts/pictures/{name}.png"))
        copies += list(run.glob(f"wandb/offline-run-*/files/media/images/pictures/{name}*.png"))
        assert len(copies) >= 2
        newest = [path.read_bytes() for path in copies]
        assert newest.count((run / f"{name}.png").read_bytes()) >= 2, "the one after the test"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "names"),
    [
        ("image/digits", {"curves", "confusion", "samples"}),
        ("text/language_model", {"curves", "samples"}),
    ],
)
def test_classes_and_texts_are_the_same_pictures_of_two_ranks(
    launch: Launch, experiment: str, names: set[str]
) -> None:
    short = ["trainer.max_epochs=1", "trainer.limit_train_batches=10", "scheduler=none"]
    if experiment.startswith("text"):
        short += ["data.datasets.test_bytes=5000", "data.datasets.val_bytes=5000"]
    one, two = (
        launch(f"experiment={experiment}", "plots=true", *short, *where) for where in ([], DDP2)
    )
    assert {path.stem for path in Path(two["directory"]).glob("*.png")} == names
    for name in sorted(names):
        assert_same_picture(one, two, name)


COMMANDS = [
    shlex.split(line)[2:]
    for line in (ROOT / "docs" / "loggers.md").read_text().splitlines()
    if line.startswith("python train.py")
]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_the_commands_of_the_page_leave_what_it_says(train: Command, arguments: list[str]) -> None:
    done = train(*arguments)
    assert done.returncode == 0, done.stderr
    (run,) = done.directory.glob("outputs/*/*")
    assert {path.name for path in run.glob("*.png")} == {"curves.png", "samples.png"}
    assert (run / "metrics.csv").exists()
    assert ("logger=tensorboard" in arguments) == (run / "tensorboard").is_dir()
    assert ("logger=wandb" in arguments) == (run / "wandb").is_dir()
    assert ("logger=mlflow" in arguments) == (done.directory / "mlflow.db").exists()
