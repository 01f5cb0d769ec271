"""The documents' loops, written out: what a person writes without any framework.

Beside their three lines a step (forward, backward, step) they keep the epoch's mean loss, as every
run here does. As a script this is the documents' ddp example::

    torchrun --nproc-per-node=2 benchmarks/by_hand.py resnet18 --steps 12 --into DIRECTORY
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

LEARNING_RATE = 0.01
Loss = Callable[[Any, Tensor], Tensor]


class Samples(Dataset[tuple[Tensor, ...]]):
    """One sample at a time, as the documents' RandomDataset."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __len__(self) -> int:
        return len(self.tensors[0])


def train(network: nn.Module, loss: Loss, batches: Iterable[Any]) -> list[float]:
    """One epoch; returns the time stamps of its steps' ends, the start before them."""
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
    total = torch.zeros(())
    stamps = [time.perf_counter()]
    for inputs, target in batches:
        optimizer.zero_grad()
        value = loss(network(inputs), target)
        value.backward()
        optimizer.step()
        total += value.detach()
        stamps.append(time.perf_counter())
    total.item()
    stamps[-1] = time.perf_counter()
    return stamps


def over_a_loader(tensors: Sequence[Tensor], batch_size: int) -> Iterable[Any]:
    return DataLoader(Samples(tensors), batch_size=batch_size, shuffle=True)


def over_indices(tensors: Sequence[Tensor], batch_size: int) -> Iterable[Any]:
    for rows in torch.split(torch.randperm(len(tensors[0])), batch_size):
        yield tuple(tensor[rows] for tensor in tensors)


def median_step_s(stamps: list[float]) -> float:
    """Of all steps but the first tenth, as lockstep counts its own."""
    steps = [after - before for before, after in pairwise(stamps[1 + len(stamps) // 10 :])]
    return median(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=("random_dataset", "resnet18", "transformer"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--into", type=Path, required=True)
    options = parser.parse_args()
    torch.distributed.init_process_group(backend="gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    network, loss, tensors, batch_size = parts(options.network, options.steps)
    data = Samples(tensors)
    sampler: Any = torch.utils.data.distributed.DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size // world_size, sampler=sampler)
    parallel = nn.parallel.DistributedDataParallel(network)
    stamps = train(parallel, loss, loader)
    if rank == 0:
        first = time.time() - (time.perf_counter() - stamps[1])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak *= 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others kB
        found = {"first_step": first, "step_s": median_step_s(stamps), "peak_memory_bytes": peak}
        (options.into / "by_hand.json").write_text(json.dumps(found))
    torch.distributed.barrier()  # without it one run in twenty aborts at its end
    torch.distributed.destroy_process_group()


def parts(name: str, steps: int) -> tuple[nn.Module, Loss, Sequence[Tensor], int]:
    """Network, loss, data and global batch size."""
    if name == "random_dataset":
        inputs = torch.randn(90, 5)
        return nn.Linear(5, 2), nn.MSELoss(), (inputs, torch.randn(90, 2)), 30
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from benchmarks import networks

    if name == "resnet18":
        return networks.resnet18(), nn.CrossEntropyLoss(), networks.images(64 * steps), 64
    return networks.Transformer(), nn.CrossEntropyLoss(), networks.texts(16 * steps), 16


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main()
