"""dp's copies of a module: `replicate` it for one forward, and compute all of them.

docs/decisions/0002-dp.md says why it is not `torch.nn.DataParallel`.
"""

from __future__ import annotations

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

_replica: ContextVar[int | None] = ContextVar("dp_replica", default=None)


def current_replica() -> int | None:
    """Index of the replica whose forward calls this; None outside, and always on one device."""
    return _replica.get()


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
