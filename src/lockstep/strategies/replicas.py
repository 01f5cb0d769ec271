"""What dp does with a batch: `split` the inputs, `replicate` the module, run, `merge` the outputs.

docs/decisions/0002-dp.md says why it is not `torch.nn.DataParallel`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from contextvars import ContextVar, copy_context
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import OptimizedModule
from torch.nn import Module, RNNBase
from torch.nn.parallel.replicate import _broadcast_coalesced_reshape as broadcast
from torch.nn.utils.rnn import PackedSequence

_replica: ContextVar[int | None] = ContextVar("dp_replica", default=None)


def current_replica() -> int | None:
    """Index of the replica whose forward calls this; None outside, and always on one device."""
    return _replica.get()


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


def replicate(module: Module, devices: Sequence[torch.device]) -> list[Module]:
    """One replica per device. The first is ``module`` itself, so its buffers are updated.

    The others are shallow copies that live for one forward, with buffers of their own. On CPU they
    share the parameters; on CUDA they get copies, whose gradients flow back through the broadcast.
    """
    parameters: list[Tensor] = list(module.parameters())
    buffers = list(module.buffers())
    if devices[0].type == "cuda":
        weights = broadcast(parameters, devices) or [[] for _ in devices]
        states = broadcast(buffers, devices, detach=True) or [[] for _ in devices]
    else:
        weights = [parameters for _ in devices]
        states = [buffers, *([buffer.clone() for buffer in buffers] for _ in devices[1:])]
    replicas = [module]
    for own in list(zip(weights, states, strict=True))[1:]:
        tensors = dict(zip([*parameters, *buffers], [*own[0], *own[1]], strict=True))
        replicas.append(_copy_modules(module, tensors, {}))
    return replicas


def _copy_modules(module: Module, own: Mapping[Tensor, Tensor], memo: dict[Module, Module]) -> Any:
    """Copy the modules and give them the tensors ``own``, as `torch.nn.parallel.replicate` does.

    That one damages a `torch.compile`d child, which hands attribute writes to the module it wraps.
    """
    if module in memo:
        return memo[module]
    if isinstance(module, OptimizedModule):
        return OptimizedModule(_copy_modules(module._orig_mod, own, memo), module.dynamo_ctx)
    replica = memo[module] = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    for name, child in module._modules.items():
        if child is not None:
            setattr(replica, name, _copy_modules(child, own, memo))
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None:
            setattr(replica, name, own[tensor])
        elif name in module._parameters:
            replica._parameters[name] = None
    if isinstance(replica, RNNBase):
        replica.flatten_parameters()  # on CUDA, so that cuDNN finds its weights in one block
    return replica


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


def share_cores(devices: Sequence[torch.device]) -> bool:
    """CPU devices are one set of cores, which a single replica fills, and one random generator.

    So they take turns in one thread. Threads were measured: they halve the speed of a small MLP, as
    two OpenMP teams compete, and dropout would differ from run to run.
    """
    return devices[0].type == "cpu"


class Replicas:
    """Computes forward of all replicas: CPU devices by turns, GPUs at once, each from a thread."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._take_turns = share_cores(devices)
        # Replica i always in thread i: the order in which autograd sums gradients depends on it.
        names = [f"dp-replica-{i}" for i in range(1, 1 if self._take_turns else len(devices))]
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=name) for name in names]

    def run(self, replicas: Sequence[Module], inputs: Sequence[Any]) -> list[Any]:
        """Outputs of ``replicas[i].forward(*args, **kwargs)``, in the order of the replicas.

        Raises:
            Exception: the first replica's, once all have ended, with a note that names the replica.
        """
        call = self._in_callers_modes(replicas, inputs)
        if self._take_turns:
            return [call(i) for i in range(len(replicas))]
        threads = enumerate(self._threads[: len(replicas) - 1], start=1)
        futures = [thread.submit(copy_context().run, call, i) for i, thread in threads]
        try:
            return [call(0), *(future.result() for future in futures)]
        finally:
            wait(futures)

    def _in_callers_modes(
        self, replicas: Sequence[Module], inputs: Sequence[Any]
    ) -> Callable[[int], Any]:
        """A function of the replica's index that repeats what torch keeps per thread.

        `torch.nn.parallel.parallel_apply` loses inference mode and the autocast dtype (bf16 becomes
        fp16). No autocast cache: the fastest replica would fill it, and gradients round by chance.
        """
        kind = self._devices[0].type
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        streams = [_stream(device) for device in self._devices]

        def call(index: int) -> Any:
            token = _replica.set(index)
            args, kwargs = inputs[index]
            try:
                with (
                    torch.inference_mode(inference),
                    torch.set_grad_enabled(grad),
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False),
                    streams[index],
                ):
                    return replicas[index].forward(*args, **kwargs)
            except Exception as error:
                where = f"replica {index} of {len(replicas)}"
                error.add_note(f"raised in dp {where}; losses, logs and metrics belong in the step")
                raise
            finally:
                _replica.reset(token)

        return call

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


def _stream(device: torch.device) -> Any:
    """This thread's stream of the device, as a context for other threads; selects the device."""
    if device.type != "cuda":
        return nullcontext()  # torch.cuda.stream(None) would look for a driver at every call
    return torch.cuda.stream(torch.cuda.current_stream(device))
