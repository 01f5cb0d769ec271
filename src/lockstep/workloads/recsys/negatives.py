"""Items that a user did not go for, drawn for each sample alone.

A draw is a hash of (seed, epoch, the sample's index, the draw's number): it depends neither on the
other samples of a rank's batch, as negatives from within the batch would, nor on a generator's
state, which differs between ranks, loader processes and after resuming.
"""

from __future__ import annotations

import torch
from torch import Tensor


def drawn_items(index: Tensor, count: int, items: int, seed: int, epoch: int) -> Tensor:
    """Samples ``(B,)`` to items ``(B, count)`` from 1 to ``items``, uniform, with repetitions."""
    of_epoch = _mixed(_mixed(torch.tensor(seed, device=index.device)) + epoch)
    of_sample = _mixed(of_epoch + index)
    draws = torch.arange(count, device=index.device)
    bits = _mixed(of_sample[:, None] + draws)
    return 1 + _shifted(bits, 1) % items


def _mixed(value: Tensor) -> Tensor:
    """SplitMix64 (Steele, Lea and Flood 2014): neighbouring numbers become unrelated ones.

    int64 wraps on overflow as the uint64 of the paper does.
    """
    value = value.to(torch.int64) - 0x61C8864680B583EB
    value = (value ^ _shifted(value, 30)) * -0x40A7B892E31B1A47
    value = (value ^ _shifted(value, 27)) * -0x6B2FB644ECCEEE15
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
