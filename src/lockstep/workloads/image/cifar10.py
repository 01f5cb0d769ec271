"""CIFAR-10 as its authors hand it out: the archive of the python version."""

from __future__ import annotations

from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch

from lockstep.data import Splits
from lockstep.errors import UsageError
from lockstep.workloads.image.augment import Transform
from lockstep.workloads.image.images import Images, Normalized, split_images, vision


def cifar10(
    root: str,
    download: bool,
    val: float,
    mean: Sequence[float],
    std: Sequence[float],
    augment: Transform | None = None,
    seed: int = 0,
) -> Splits:
    """50,000 images of 32 x 32 for training, a share ``val`` of each class taken from them, and the
    authors' 10,000 for the test (Krizhevsky 2009).

    Raises `UsageError` where files are missing or are not those that the authors made.
    """
    with vision("data=cifar10"):
        from torchvision.datasets import CIFAR10
    if download:
        _download(CIFAR10, Path(root))
    # torchvision compares each file with its checksum before anything is read from it: what is
    # unpickled is what the authors made. A restricted unpickler could not tell a torn file.
    try:
        parts = [CIFAR10(root, train=train) for train in (True, False)]
    except RuntimeError as error:
        raise UsageError(
            f"data=cifar10 needs the files of CIFAR-10 in {Path(root) / CIFAR10.base_folder}, as "
            "the authors made them; they are not there, or their checksums differ. Use "
            "data.datasets.download=true, or data.datasets.root=<the folder above them>."
        ) from error
    train, test = (_images(part, Normalized(mean, std)) for part in parts)
    splits = split_images(train, val, 0.0, seed, augment)
    return Splits(splits.train, splits.val, test)


def _download(dataset: Any, root: Path) -> None:
    """One rank at a time, the first of a machine for all; an archive that is there is used."""
    from filelock import FileLock

    root.mkdir(parents=True, exist_ok=True)
    archive = root / dataset.filename
    try:
        with FileLock(root / f".{dataset.filename}.lock"):
            dataset(str(root), download=True)
    except (OSError, RuntimeError, HTTPException) as error:
        raise UsageError(
            f"{dataset.url} must arrive whole, with MD5 {dataset.tgz_md5}; got: {error} Try again, "
            f"or fetch it by other means, as {archive}."
        ) from error


def _images(part: Any, normalized: Normalized) -> Images:
    images = torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous()
    return Images(images, torch.tensor(part.targets), part.classes, normalized)
