"""What dp does with a batch: `split` inputs over replicas, `merge` their outputs.

docs/decisions/0002-dp.md says why it is not `torch.nn.parallel.scatter_gather`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_leaves(leaf: Callable[[str, Sequence[Any]], Any], path: str, trees: Sequence[Any]) -> Any:
    """Join equally built trees into one by ``leaf(path, [leaf of each tree])``.

    Tuples, named tuples, lists, mappings and dataclasses are containers, and keep their types.

    Raises:
        ValueError: the trees differ in structure, or hold a `PackedSequence`.
    """
    first = trees[0]
    shapes = [_structure(tree) for tree in trees]
    if any(shape != shapes[0] for shape in shapes) or isinstance(first, PackedSequence):
        raise ValueError(
            "dp splits and merges tensors with one row per sample, in containers that are equal in "
            f"all replicas; {path} is {' and '.join(shapes)}. Pack, pad or regroup elsewhere."
        )
    if isinstance(first, Mapping):
        result: Any = copy.copy(first)  # type(first)(...) would lose the factory of a defaultdict
        for key in first:
            result[key] = map_leaves(leaf, f"{path}[{key!r}]", [tree[key] for tree in trees])
        return result
    if isinstance(first, tuple | list):
        columns = enumerate(zip(*trees, strict=True))
        items = [map_leaves(leaf, f"{path}[{i}]", column) for i, column in columns]
        return first._make(items) if hasattr(first, "_make") else type(first)(items)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        result = copy.copy(first)
        for name in (field.name for field in dataclasses.fields(first)):
            value = map_leaves(leaf, f"{path}.{name}", [getattr(tree, name) for tree in trees])
            object.__setattr__(result, name, value)  # frozen dataclasses too
        return result
    return leaf(path, trees)


def _structure(tree: Any) -> str:
    keys = list(tree) if isinstance(tree, Mapping) else ""
    return f"{type(tree).__name__}{f'({len(tree)})' if isinstance(tree, tuple | list) else keys}"


def chunk_sizes(inputs: Any, devices: int) -> list[int]:
    """Samples per replica as ``torch.chunk`` divides: 7 on 3 devices are [3, 3, 1].

    Args:
        inputs: any nesting; tensors are (B, ...), or () and then not split.

    Returns:
        At most ``devices`` sizes that sum to B; [] when there is no tensor to split.

    Raises:
        ValueError: the tensors disagree about B.
    """
    rows: dict[str, int] = {}

    def count(path: str, leaves: Sequence[Any]) -> None:
        if isinstance(leaves[0], Tensor) and leaves[0].ndim > 0:
            rows[path] = len(leaves[0])

    map_leaves(count, "inputs", [inputs])
    samples = max(rows.values(), default=0)
    if any(length != samples for length in rows.values()):
        raise ValueError(
            "dp splits dimension 0 of each tensor that forward receives: it must be the batch; got "
            f"{', '.join(f'{path}: {length}' for path, length in rows.items())}. "
            "Expand the odd one to the batch, or keep it as a buffer of the module."
        )
    size = max(1, -(-samples // devices))
    return [min(size, samples - i) for i in range(0, max(1, samples), size)] if rows else []


def split(inputs: Any, sizes: Sequence[int], devices: Sequence[torch.device]) -> list[Any]:
    """Scatter: per chunk a copy of ``inputs`` with its rows of each tensor; the rest goes to all.

    CUDA rows move to the replica's device; CPU tensors stay, as `pack_padded_sequence` wants them.
    """

    def chunk(start: int, size: int, device: torch.device) -> Any:
        def take(_: str, leaves: Sequence[Any]) -> Any:
            (part,) = leaves
            if isinstance(part, Tensor) and part.ndim > 0:
                part = part.narrow(0, start, size)
            on_gpu = isinstance(part, Tensor) and part.is_cuda
            return part.to(device, non_blocking=True) if on_gpu else part

        return map_leaves(take, "inputs", [inputs])

    if len(sizes) < 2:
        return [inputs]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [chunk(*chunk_of) for chunk_of in zip(starts, sizes, devices, strict=True)]


def merge(outputs: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    """Gather: concatenate tensors on ``device``; any other leaf must be equal in all replicas.

    Args:
        outputs: one per replica; tensors are (k * samples of the replica, ...), with one k for all.
        sizes: samples per replica.

    Raises:
        ValueError: a leaf cannot be gathered; the message names it, as in ``output['meta']``.
    """

    def gather(path: str, leaves: Sequence[Any]) -> Any:
        if isinstance(leaves[0], Tensor):
            return _concatenate(path, leaves, sizes, device)
        try:
            equal = all(bool(leaf == leaves[0]) for leaf in leaves)
        except (TypeError, ValueError, RuntimeError):  # arrays compare to arrays, not to one truth
            equal = False
        if equal:
            return leaves[0]
        raise ValueError(
            f"dp merges tensors, and values that are equal in all replicas; {path} is "
            f"{' and '.join(repr(leaf)[:60] for leaf in leaves)}. "
            "Return a tensor with one row per sample, or compute it in the step."
        )

    return map_leaves(gather, "output", outputs) if len(outputs) > 1 else outputs[0]


def _concatenate(
    path: str, parts: Sequence[Tensor], sizes: Sequence[int], device: torch.device
) -> Tensor:
    if any(part.ndim == 0 for part in parts):
        raise ValueError(
            f"dp cannot merge 0-dim tensors; {path} is one. A mean of chunk means is not the mean "
            f"of the batch when chunks differ (here {list(sizes)}). "
            "Return one value per sample, and reduce them in the step."
        )
    k = len(parts[0]) // sizes[0]
    kinds = {(part.shape[1:], part.dtype) for part in parts}
    if len(kinds) > 1 or [len(part) for part in parts] != [k * size for size in sizes]:
        raise ValueError(
            f"dp concatenates tensors with one row per sample; for {list(sizes)} samples {path} is "
            f"{' and '.join(f'{tuple(part.shape)} {part.dtype}' for part in parts)}. "
            "Pad it to a fixed shape, or compute it in the step."
        )
    return torch.cat([part.to(device) for part in parts])
