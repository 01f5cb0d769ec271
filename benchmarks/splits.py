"""The data of `benchmarks.networks` as lockstep takes it."""

from __future__ import annotations

from typing import Any

from benchmarks import networks

from lockstep.data import Splits
from lockstep.data.tensors import Tensors


def numbers(samples: int) -> Splits:
    return Splits(Tensors(*networks.numbers(samples)))


def images(samples: int) -> Splits:
    return Splits(Tensors(*networks.images(samples)))


def texts(samples: int, **sizes: Any) -> Splits:
    return Splits(Tensors(*networks.texts(samples, **sizes)))
