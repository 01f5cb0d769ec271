"""Augmentation whose draws follow from (seed, epoch, sample), wherever the sample is read.

A rank's or a loader process's own generator would make the result depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from lockstep.data.epoch import Epoch

Transform = Callable[[Tensor], Tensor]
"""From an image ``(C, H, W)`` to an image; draws from torch's generator on the CPU, as all of
``torchvision.transforms.v2`` do."""


class Drawn:
    """Applies ``transform`` to sample ``index``, always with the same draws in one epoch."""

    def __init__(self, transform: Transform) -> None:
        self.transform, self._epoch = transform, Epoch()

    def start_epoch(self, seed: int, epoch: int) -> None:
        self._epoch.start(seed, epoch)

    def __call__(self, index: int, image: Tensor) -> Tensor:
        # Not torch.manual_seed, which also seeds the GPUs, and with them dropout.
        generator = torch.default_generator
        before = generator.get_state()
        generator.manual_seed(self._epoch.seed_of(index))
        try:
            return self.transform(image)
        finally:
            generator.set_state(before)


class ShiftAndFlip:
    """Moves an image by up to ``shift`` pixels each way, black coming in; ``flip`` mirrors half of
    them. Not for digits or letters: a mirrored 2 is none."""

    def __init__(self, shift: int = 0, flip: bool = False) -> None:
        self.shift, self.flip = shift, flip

    def __call__(self, image: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        top, left = torch.randint(2 * self.shift + 1, (2,)).tolist()
        padded = pad(image, [self.shift] * 4)
        moved = padded[..., top : top + height, left : left + width]
        return moved.flip(-1) if self.flip and torch.rand(()) < 0.5 else moved
