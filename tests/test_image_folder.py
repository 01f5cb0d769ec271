"""One's own pictures in folders of classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Launch
from pictures import write_folders
from PIL import Image
from torch.utils.data import DataLoader

from lockstep.errors import UsageError
from lockstep.workloads.image.folder import image_folder, read_picture


def folder(root: Path, **changes: Any) -> Any:
    settings = {"size": 8, "val": 0.25, "test": 0.25, "mean": [0.0] * 3, "std": [1.0] * 3}
    return image_folder(str(root), **{**settings, **changes})


def test_class_folders_are_shared_out_by_class_and_seed(tmp_path: Path) -> None:
    write_folders(tmp_path, {"ant": 8, "bee": 4, "cat": 12})
    splits = folder(tmp_path)
    assert splits.train.classes == ["ant", "bee", "cat"]
    labels = [
        [label for _, label in part.files] for part in (splits.train, splits.val, splits.test)
    ]
    assert [[part.count(index) for index in range(3)] for part in labels] == [
        [4, 2, 6],
        [2, 1, 3],
        [2, 1, 3],
    ]
    files = [file for part in (splits.train, splits.val, splits.test) for file in part.files]
    assert len(set(files)) == 24
    assert folder(tmp_path).test.files == splits.test.files
    assert folder(tmp_path, seed=1).test.files != splits.test.files
    image, label = splits.train[-1]
    assert image.shape == (3, 8, 8)
    assert label == 2
    assert image[2].eq(1.0).all(), "cats are blue"


def test_folders_train_val_and_test_are_taken_as_they_are(tmp_path: Path) -> None:
    for name, count in {"train": 4, "test": 3}.items():
        write_folders(tmp_path / name, {"ant": count, "bee": count})
    splits = folder(tmp_path)
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [6, 2, 6]
    assert folder(tmp_path, val=0.0).val is None
    write_folders(tmp_path / "val", {"ant": 1, "cow": 1})
    with pytest.raises(UsageError, match=r"val must have the classes of .*train; .* bee, cow"):
        folder(tmp_path)


MODES = ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I"]


def white(mode: str) -> Any:
    if mode in ("I;16", "I"):
        return Image.new(mode, (20, 10), 65535)
    return Image.new("RGB", (20, 10), "white").convert("L" if mode == "LA" else "RGB").convert(mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_white_picture_of_any_mode_becomes_white_rgb(mode: str, tmp_path: Path) -> None:
    path = tmp_path / f"picture.{ {'CMYK': 'jpg', 'YCbCr': 'jpg', 'I': 'tiff'}.get(mode, 'png') }"
    white(mode).save(path, **({"transparency": bytes(256)} if mode == "P" else {}))
    image = read_picture(str(path), 8)
    assert (image.shape, image.dtype) == ((3, 8, 8), torch.uint8)
    assert image.min() >= 254


@pytest.mark.parametrize(("mode", "ending"), [("I;16", "png"), ("I", "tiff")])
def test_16_bits_are_scaled_to_8(mode: str, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"picture.{ending}"
    Image.new(mode, (20, 10), 0x8000).save(path)
    assert read_picture(str(path), 8).eq(0x80).all()


def test_a_picture_is_turned_upright_and_cut_in_the_middle(tmp_path: Path) -> None:
    picture = Image.new("RGB", (10, 30), (255, 0, 0))
    picture.paste((0, 255, 0), (0, 10, 5, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side: what is left belongs on top
    picture.save(tmp_path / "turned.png", exif=exif)
    image = read_picture(str(tmp_path / "turned.png"), 10)
    assert image[:, 0, 5].tolist() == [0, 255, 0]
    assert image[:, 9, 5].tolist() == [255, 0, 0]
    assert image[1, 0].eq(255).all(), "the middle third of what is 30 wide"


@pytest.mark.parametrize(
    ("break_", "words"),
    [
        (Path.absolute, r"there is no such folder"),
        (Path.mkdir, r"Couldn't find any class folder in .*nothing"),
        (
            lambda root: (write_folders(root, {"ant": 2}), (root / "bee").mkdir()),
            r"no valid file for the classes bee",
        ),
        (
            lambda root: (
                write_folders(root, {"ant": 8}),
                (root / "ant" / "x.png").write_text("text"),
            ),
            r"ant/x\.png must be a whole picture.*Mend or remove",
        ),
    ],
    ids=["missing", "empty", "class without pictures", "no picture"],
)
def test_folders_that_cannot_be_used_are_named(
    break_: Callable[[Path], Any], words: str, tmp_path: Path
) -> None:
    break_(tmp_path / "nothing")
    with pytest.raises(UsageError, match=words) as raised:
        folder(tmp_path / "nothing")
    assert str(tmp_path / "nothing") in str(raised.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_torn_picture_is_named_when_it_is_read(workers: int, tmp_path: Path) -> None:
    write_folders(tmp_path, {"ant": 1})
    whole = tmp_path / "ant" / "0.png"
    picture = Image.effect_noise((64, 64), 50)
    picture.save(whole)
    whole.write_bytes(whole.read_bytes()[:1000])
    data = folder(tmp_path, val=0.0, test=0.0).train
    with pytest.raises(UsageError, match=r"ant/0\.png must be a whole picture"):
        list(DataLoader(data, num_workers=workers))


def test_pictures_train_to_their_classes_and_a_wrong_number_is_told(
    launch: Launch, tmp_path: Path
) -> None:
    write_folders(tmp_path / "pictures", {"ant": 10, "bee": 10, "cat": 10})
    overrides = [
        "data=image_folder",
        f"data.datasets.root={tmp_path / 'pictures'}",
        "data.datasets.size=8",
        "data.num_workers=0",
        "model=cnn",
        "model.network.channels=3",
        "optimizer.lr=0.01",
        "trainer.max_epochs=8",
    ]
    with pytest.raises(UsageError, match=r"got 10 and 3 \(ant, bee, cat\). Use model.classes=3"):
        launch(*overrides)
    result = launch(*overrides, "model.classes=3")
    assert result["metrics"]["test/accuracy"] == 1.0
    assert result["metrics"]["test/confusion"] == [[2, 0, 0], [0, 2, 0], [0, 0, 2]]
