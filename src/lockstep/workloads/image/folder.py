"""A person's own pictures: a folder for each class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from lockstep.data import Splits
from lockstep.errors import UsageError
from lockstep.workloads.image.augment import Drawn, Transform
from lockstep.workloads.image.images import Normalized, split_by_class, vision

NAMES = ("train", "val", "test")


class Pictures(Dataset[tuple[Tensor, int]]):
    """Files and the index of their class; each is read when it is asked for.

    A sample is float32 ``(3, size, size)``: whatever its mode, RGB; whatever its shape, scaled to
    cover the square and cut in the middle.
    """

    def __init__(
        self,
        files: Sequence[tuple[str, int]],
        classes: Sequence[str],
        size: int,
        normalized: Normalized,
        augment: Transform | None = None,
    ) -> None:
        self.files, self.classes, self.size = list(files), list(classes), size
        self.normalized, self.drawn = normalized, Drawn(augment) if augment else None

    def start_epoch(self, seed: int, epoch: int) -> None:
        if self.drawn:
            self.drawn.start_epoch(seed, epoch)

    def __len__(self) -> int:
        return len(self.files)

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        image = read_picture(path, self.size)
        if self.drawn:
            image = self.drawn(index, image)
        return self.normalized(image), label


def image_folder(
    root: str,
    size: int,
    val: float,
    test: float,
    mean: Sequence[float],
    std: Sequence[float],
    check: bool = True,
    augment: Transform | None = None,
    seed: int = 0,
) -> Splits:
    """``root/<class>/<picture>``, shared out by class, or ``root/train/<class>/<picture>``.

    Beside ``train`` there may be ``val`` and ``test``; one that is missing is a share of ``train``,
    none where its share is 0. ``check`` opens each file once, before training.
    Raises `UsageError` with the folder or file that is missing, empty or cannot be read.
    """
    folders = {name: Path(root) / name for name in NAMES if (Path(root) / name).is_dir()}
    if "train" not in folders:
        folders = {"train": Path(root)}
    found = {name: find_pictures(folder) for name, folder in folders.items()}
    files, classes = found.pop("train")
    for name, (_, others) in found.items():
        if others != classes:
            odd = ", ".join(sorted({*others} ^ {*classes}))
            raise UsageError(
                f"{folders[name]} must have the classes of {folders['train']}; only one of them "
                f"has {odd}. Make the folder, or remove it."
            )
    labels = torch.tensor([label for _, label in files])
    val, test = (0.0 if "val" in found else val), (0.0 if "test" in found else test)
    rows = split_by_class(labels, val, test, seed)
    parts = {
        name: [files[row] for row in chosen.tolist()]
        for name, chosen, share in zip(NAMES, rows, (1.0, val, test), strict=True)
        if share
    }
    parts |= {name: others for name, (others, _) in found.items()}
    if check:
        for path, _ in (item for part in parts.values() for item in part):
            _opened(path).close()

    def pictures(name: str, transform: Transform | None) -> Pictures | None:
        if name not in parts:
            return None
        return Pictures(parts[name], classes, size, Normalized(mean, std), transform)

    train = pictures("train", augment)
    assert train is not None
    return Splits(train, pictures("val", None), pictures("test", None))


def find_pictures(folder: Path) -> tuple[list[tuple[str, int]], list[str]]:
    """Files with the index of their class, and the names of the classes, both sorted."""
    with vision("data=image_folder"):
        from torchvision.datasets import ImageFolder
    try:
        found = ImageFolder(str(folder))
    except FileNotFoundError as error:
        what = "there is no such folder" if not folder.is_dir() else str(error)
        raise UsageError(
            f"{folder.absolute()} must hold a folder of pictures for each class: {what}. Look at "
            "data.datasets.root; a class without pictures needs some, or no folder."
        ) from error
    return found.samples, found.classes


def read_picture(path: str, size: int) -> Tensor:
    """Bytes ``(3, size, size)``."""
    image: Any = _opened(path)
    try:
        with image:
            upright = _as_rgb(ImageOps.exif_transpose(image))
    except (OSError, SyntaxError, ValueError) as error:  # what Pillow's readers raise, file by file
        raise _unreadable(path, error) from error
    square = ImageOps.fit(upright, (size, size), Image.Resampling.BILINEAR)
    return torch.from_numpy(numpy.array(square)).permute(2, 0, 1).contiguous()


def _as_rgb(image: Any) -> Any:
    """Without the alpha channel; Pillow would cut 16 bits off at 255, instead of scaling them."""
    if image.mode.startswith("I"):
        image = Image.fromarray((numpy.asarray(image) // 256).clip(0, 255).astype(numpy.uint8))
    elif image.mode == "P":
        image = image.convert("RGBA")  # a palette may have transparent colours
    return image.convert("RGB")


def _opened(path: str) -> Any:
    try:
        return Image.open(path)
    except (OSError, UnidentifiedImageError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> UsageError:
    return UsageError(
        f"{path} must be a whole picture that Pillow can read; got {type(error).__name__}: "
        f"{error}. Mend or remove the file."
    )
