"""Bytes that an exchange moves."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


def size_of(tensors: Iterable[Tensor], element_size: int | None = None) -> int:
    """Bytes of all, or of as many numbers of ``element_size`` bytes."""
    return sum(item.numel() * (element_size or item.element_size()) for item in tensors)


def gradient_bytes(module: nn.Module, element_size: int | None = None) -> int:
    """Of all gradients of one backward pass; with ``element_size``, at as many bytes a number."""
    return size_of((item for item in module.parameters() if item.requires_grad), element_size)


def through_ring(payload: float, ranks: int) -> float:
    """What each link of a ring moves to all-reduce ``payload`` bytes (Patarasu and Yuan 2009)."""
    return 2 * (ranks - 1) / ranks * payload
