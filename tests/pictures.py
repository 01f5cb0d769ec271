"""Images for tests: made on the spot, recorded pixel by pixel, archived, and written as files."""

from __future__ import annotations

import hashlib
import json
import pickle
import tarfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image

from lockstep.data import Splits
from lockstep.workloads.image.augment import ShiftAndFlip
from lockstep.workloads.image.images import Images, Normalized


def numbered(samples: int) -> Splits:
    """Random images ``(samples, 1, 8, 8)`` whose class is their index, shifted and flipped."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (samples, 1, 8, 8), generator=generator, dtype=torch.uint8)
    classes = [str(index) for index in range(samples)]
    normalized = Normalized([0.5], [0.5])
    augment = ShiftAndFlip(3, flip=True)
    return Splits(Images(images, torch.arange(samples), classes, normalized, augment))


class PixelRecorder(Callback):
    """Write, per rank, a digest of each image that was trained on, by the image's class."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        images, labels = batch
        row = {
            "place": [trainer.current_epoch, batch_idx],
            "images": {
                int(label): hashlib.sha256(image.numpy().tobytes()).hexdigest()
                for image, label in zip(images, labels, strict=True)
            },
        }
        with (Path(self.directory) / f"pixels-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def global_images(directory: str) -> dict[tuple[int, int], dict[str, str]]:
    """(epoch, batch) -> index -> digest of that global batch's images, over all ranks."""
    batches: dict[tuple[int, int], dict[str, str]] = defaultdict(dict)
    for path in sorted(Path(directory).glob("pixels-*.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            epoch, batch = row["place"]
            batches[epoch, batch] |= row["images"]
    return dict(batches)


def archive(root: Path, per_file: int = 20) -> tuple[Path, dict[str, Any]]:
    """A small CIFAR-10 archive in ``root``, and the attributes of torchvision's class that name its
    files and checksums. Image i of a file is of class i % 10 and has that value everywhere."""
    files: dict[str, Any] = {
        "batches.meta": {"label_names": [f"class{index}" for index in range(10)]}
    }
    labels = [index % 10 for index in range(per_file)]
    pixels = numpy.array(labels, dtype=numpy.uint8)[:, None].repeat(3072, 1)
    for name in [*(f"data_batch_{index}" for index in range(1, 6)), "test_batch"]:
        files[name] = {"data": pixels, "labels": labels, "name": name}
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    path = root / "cifar-10-python.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder, folder.name)
    sums = {name: md5(folder / name) for name in files}
    for name in files:
        (folder / name).unlink()
    folder.rmdir()
    return path, {
        "tgz_md5": md5(path),
        "train_list": [[name, sums[name]] for name in files if name.startswith("data")],
        "test_list": [["test_batch", sums["test_batch"]]],
        "meta": {
            "filename": "batches.meta",
            "key": "label_names",
            "md5": sums["batches.meta"],
        },
    }


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def write_folders(root: Path, pictures: dict[str, int]) -> None:
    """``root/<class>/<number>.png`` of 12 x 10 pixels; classes are red, green and blue."""
    for number, (name, count) in enumerate(pictures.items()):
        (root / name).mkdir(parents=True)
        for index in range(count):
            colour = [index, index, index]
            colour[number] = 255
            Image.new("RGB", (12, 10), tuple(colour)).save(root / name / f"{index}.png")
