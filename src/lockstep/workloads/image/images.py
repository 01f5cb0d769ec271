"""Images in memory, kept as bytes and given out as normalized floats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from typing_extensions import override

from lockstep.data import Splits
from lockstep.data.tensors import Tensors
from lockstep.errors import UsageError
from lockstep.workloads.image.augment import Drawn, Transform


@contextmanager
def vision(what: str) -> Iterator[None]:
    """Raises `UsageError` where a package is not installed that ``what`` imports within."""
    try:
        yield
    except ModuleNotFoundError as missing:
        install = "pip install 'lockstep[vision]'"
        raise UsageError(f"{what} needs {missing.name}: {install}") from missing


class Normalized:
    """From bytes ``(..., C, H, W)`` in 0 to 255 to ``(x / 255 - mean) / std`` in float32."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = (torch.tensor(list(values))[:, None, None] for values in (mean, std))

    def __call__(self, images: Tensor) -> Tensor:
        normalized: Tensor = (images.float() / 255 - self.mean) / self.std
        return normalized


class Images(Tensors):
    """Images ``(N, C, H, W)``, uint8, with the index of their class ``(N,)``.

    What ``augment`` draws follows from (seed, epoch, index); it sees an image before it is
    normalized, so that what it pads is black.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        classes: Sequence[str],
        normalized: Normalized,
        augment: Transform | None = None,
    ) -> None:
        super().__init__(images, labels)
        self.classes, self.normalized = list(classes), normalized
        self.drawn = Drawn(augment) if augment else None

    def start_epoch(self, seed: int, epoch: int) -> None:
        if self.drawn:
            self.drawn.start_epoch(seed, epoch)

    @override
    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        images, labels = super().__getitems__(indices)
        if self.drawn:
            pairs = zip(indices, images, strict=True)
            images = torch.stack([self.drawn(index, image) for index, image in pairs])
        return self.normalized(images), labels


def split_by_class(labels: Tensor, val: float, test: float, seed: int) -> list[Tensor]:
    """Indices for training, validation and test: of each class the same shares, drawn by ``seed``.

    Shares are of a class and rounded to whole samples.
    """
    generator = torch.Generator().manual_seed(seed)
    parts: list[list[Tensor]] = [[], [], []]
    for label in sorted(set(labels.tolist())):
        of_class = (labels == label).nonzero().flatten()
        order = of_class[torch.randperm(len(of_class), generator=generator)]
        tests, vals = round(len(order) * test), round(len(order) * val)
        rest = order[tests:]
        for part, rows in zip(parts, (rest[vals:], rest[:vals], order[:tests]), strict=True):
            part.append(rows)
    return [torch.cat(part).sort().values for part in parts]


def split_images(
    data: Images, val: float, test: float, seed: int, augment: Transform | None
) -> Splits:
    """Splits of ``data``; only the training part is augmented. A share of 0: no such split."""
    images, labels = data.tensors
    rows = split_by_class(labels, val, test, seed)

    def part(index: int, transform: Transform | None) -> Images:
        chosen = rows[index]
        return Images(images[chosen], labels[chosen], data.classes, data.normalized, transform)

    return Splits(part(0, augment), part(1, None) if val else None, part(2, None) if test else None)
