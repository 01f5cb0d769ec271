"""Do all processes read a stream in one order? Each keeps its share of it, counted by place."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lockstep.data.stream import Stream
from lockstep.errors import UsageError
from lockstep.group import gather, in_group

SAMPLES = 256
"""How many are compared: a stream that begins alike and differs later is not found out."""


def refuse_other_orders(stream: Stream, seed: int, epoch: int, num_workers: int) -> None:
    """Raise `UsageError` on all ranks where the first `SAMPLES` samples differ: between two
    readings of one process, or between ranks. Some samples would be seen twice, others never.

    A single process without loader processes may read in any order; nothing is compared there.
    """
    if num_workers == 0 and not in_group():
        return
    readings = gather([_digest_of_beginning(stream, seed, epoch) for _ in range(2)])
    name = type(stream.source).__name__
    if any(first != again for first, again in readings):
        what = "two readings in one process differ"
    elif strangers := [rank for rank, mine in enumerate(readings) if mine != readings[0]]:
        what = f"those of ranks {strangers} differ from rank 0's"
    else:
        return
    raise UsageError(
        f"The {stream.name} stream must yield the same samples in the same order to every process; "
        f"of the first {min(SAMPLES, len(stream))} of {name}, {what}. Draw from the generators of "
        "Python, NumPy or torch, or by start_epoch(seed, epoch), not from one without a seed; sort "
        "what comes from a set or os.listdir."
    )


def _digest_of_beginning(stream: Stream, seed: int, epoch: int) -> str:
    probe = Stream(stream.source, stream.name)
    probe.start_epoch(seed, epoch)
    digest = hashlib.sha256()
    for sample in probe.read(range(min(SAMPLES, len(stream)))):
        for leaf in tree_leaves(sample):
            digest.update(_bytes_of(leaf))
    return digest.hexdigest()


def _bytes_of(leaf: Any) -> bytes:
    if not isinstance(leaf, Tensor):
        return pickle.dumps(leaf)
    values = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{leaf.dtype} {tuple(leaf.shape)}".encode() + values.numpy().tobytes()
