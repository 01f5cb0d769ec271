"""An all-reduce over the devices and hosts that a run would use: is the sum right, how fast is it.

The bandwidth is what nccl-tests call bus bandwidth: each of n ranks sends 2 (n - 1) / n times the
bytes of the tensor, whatever the algorithm, so it compares with what the link can do
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from lockstep.doctor.finding import Finding
from lockstep.doctor.machine import backend_of
from lockstep.errors import one_line

SIZE_BYTES = 16 * 2**20
REPEATS = 5
REPAIR = (
    "Look first at firewalls between the hosts (any port, both ways), at GLOO_SOCKET_IFNAME or "
    "NCCL_SOCKET_IFNAME, and with NCCL_DEBUG=INFO at NCCL's own words."
)


def on_this_machine(accelerator: str, count: int, timeout_s: float) -> Finding:
    """Start ``count`` processes here and let them add."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    said = mp.get_context("spawn").SimpleQueue()
    arguments = (count, store.port, accelerator, timeout_s, said)
    try:
        start_processes(_rank, arguments, count, start_method="spawn")  # type: ignore[no-untyped-call]
    except (ProcessRaisedException, ProcessExitedException) as error:
        return failed(count, error)
    return Finding("all-reduce", said.get())


def _rank(rank: int, count: int, port: int, accelerator: str, timeout_s: float, said: Any) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    backend = backend_of(accelerator)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=limit)
    text = measured(rank, count, _device(backend, rank))
    if rank == 0:
        said.put(text)
    dist.destroy_process_group()


def join(accelerator: str, timeout_s: float) -> str:
    """Make the group of the ranks that torchrun started, and add; what was measured."""
    backend = backend_of(accelerator)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    device = _device(backend, int(os.environ["LOCAL_RANK"]))
    return measured(dist.get_rank(), dist.get_world_size(), device)


def measured(rank: int, count: int, device: torch.device) -> str:
    """Raises ValueError for a wrong sum."""
    tensor = torch.empty(SIZE_BYTES // 4, device=device)
    seconds = []
    for _ in range(1 + REPEATS):  # the first opens the connections
        tensor.fill_(rank + 1)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    expected = count * (count + 1) / 2
    if not bool((tensor == expected).all()):
        raise ValueError(f"the sum over {count} ranks must be {expected}; got {tensor[0].item()}")
    taken = statistics.median(seconds[1:])
    rate = 2 * (count - 1) / count * SIZE_BYTES / taken / 1e9
    size = f"{SIZE_BYTES // 2**20} MiB over {count} ranks ({dist.get_backend()}, {device.type})"
    return f"{size} in {taken * 1e3:.1f} ms" + (f", {rate:.2f} GB/s a rank" if count > 1 else "")


def failed(count: int, error: BaseException) -> Finding:
    text = f"of {count} ranks failed on {socket.gethostname()}: {one_line(error)}"
    return Finding("all-reduce", text.rstrip("."), REPAIR)


def _device(backend: str, local_rank: int) -> torch.device:
    if backend != "nccl":
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
