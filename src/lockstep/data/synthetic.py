"""Data made on the spot from a seed: the documents' random tensors, and a known teacher.

All of it is made on the CPU: a data set on a GPU cannot be read by loader processes, and puts the
same samples on every rank's device.
"""

from __future__ import annotations

import torch

from lockstep.data.module import Splits
from lockstep.data.tensors import Tensors


def standard_normal(samples: int, features: int, targets: int, seed: int = 0) -> Splits:
    """Inputs ``(samples, features)`` and targets ``(samples, targets)``, unrelated noise.

    The best constant answer is 0, with a mean squared error of about 1. The same samples serve for
    training and test, as in the documents.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, features, generator=generator)
    answers = torch.randn(samples, targets, generator=generator)
    data = Tensors(inputs, answers)
    return Splits(train=data, test=data)


def teacher_regression(
    train: int, val: int, test: int, features: int = 10, noise: float = 0.3, seed: int = 0
) -> Splits:
    """``y = sin(x W) v + noise``: a network can learn it down to the noise, and no further.

    Inputs are ``(n, features)``, targets ``(n, 1)``. The known floor of the mean squared error is
    the noise really drawn for the test samples.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(features, 2, generator=generator) / features**0.5
    mix = torch.randn(2, 1, generator=generator)
    count = train + val + test
    inputs = torch.randn(count, features, generator=generator)
    error = noise * torch.randn(count, 1, generator=generator)
    targets = torch.sin(inputs @ weight) @ mix + error
    floor = error[train + val :].square().mean().item() if test else None
    ends = (slice(train), slice(train, train + val), slice(train + val, count))
    first, second, third = (Tensors(inputs[part], targets[part]) for part in ends)
    return Splits(first, second if val else None, third if test else None, floor=floor)
