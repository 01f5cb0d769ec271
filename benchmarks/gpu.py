"""``python -m benchmarks.gpu``: one GPU, a few minutes: throughput beside the loop by hand.

ResNet-18 on CIFAR shapes and a transformer of 111 M parameters, both in bf16-mixed. Prints
for each: samples (or tokens) per second of both sides and their ratio (wanted: 0.99 or more), the
share of the GPU's bf16 peak, the waits for the GPU in a step (wanted: none), and how much of the
copying of batches to the GPU was hidden behind kernels. ``--try`` runs a small version on the CPU,
to see that the script works.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.profiler import DeviceType, ProfilerActivity, profile

from benchmarks import networks
from benchmarks.ours import outcome_of

ROUNDS = 3
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40": 181e12, "L4": 121e12}
"""Dense bf16 operations per second, from NVIDIA's data sheets (SXM where there are several)."""


@dataclass(frozen=True)
class Case:
    """One network on one kind of batch, the same on both sides."""

    name: str
    make: Callable[[], nn.Module]
    tensors: networks.Pair
    batch: int
    items: int
    """What is counted of a sample: itself, or its tokens."""
    overrides: tuple[str, ...]


def cases(small: bool) -> list[Case]:
    batch, steps = (4, 6) if small else (512, 60)
    images = Case(
        "ResNet-18, 3x32x32",
        networks.resnet18,
        networks.images(batch * steps),
        batch,
        1,
        ("data=bench_images", "model=bench_resnet18"),
    )
    size = {"layers": 2, "width": 64, "heads": 4} if small else LARGE
    tokens, vocabulary, texts, steps = (16, 256, 2, 6) if small else (512, 16384, 32, 40)
    text = Case(
        "transformer",
        lambda: networks.Transformer(vocabulary=vocabulary, **size),
        networks.texts(texts * steps, tokens, vocabulary),
        texts,
        tokens,
        (
            "data=bench_texts",
            "model=bench_transformer",
            f"+data.datasets.tokens={tokens}",
            f"+data.datasets.vocabulary={vocabulary}",
            f"+model.network.vocabulary={vocabulary}",
            *(f"+model.network.{name}={value}" for name, value in size.items()),
        ),
    )
    return [images, text]


LARGE = {"layers": 12, "width": 768, "heads": 12}
"""85 M parameters in the blocks, 13 M in each of embedding and head."""


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--try", dest="small", action="store_true", help="a small one, on the CPU")
    small = parser.parse_args().small
    if not small and not torch.cuda.is_available():
        parser.error("there is no GPU here; --try runs a small version on the CPU.")
    device = torch.device("cpu" if small else "cuda")
    name = "CPU" if small else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, bf16-mixed, {ROUNDS} rounds")
    for case in cases(small):
        print(json.dumps(measured(case, device, name)))


def measured(case: Case, device: torch.device, gpu: str) -> dict[str, Any]:
    by_hand, ours = [], []
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as scratch:
        for number in range(ROUNDS):
            by_hand.append(hand_step_s(case, device))
            ours.append(our_step_s(case, device, Path(scratch) / str(number)))
        traced = trace(case, device, Path(scratch) / "traced")
    step = median(ours)
    operations = operations_of(case)
    peak = next((value for part, value in PEAKS.items() if part in gpu), None)
    return {
        "network": case.name,
        "parameters": sum(item.numel() for item in case.make().parameters()),
        "per second": round(case.batch * case.items / step),
        "per second by hand": round(case.batch * case.items / median(by_hand)),
        "ratio": round(median(h / o for h, o in zip(by_hand, ours, strict=True)), 4),
        "share of bf16 peak": None if peak is None else round(operations / step / peak, 3),
        **traced,
    }


def hand_step_s(case: Case, device: torch.device) -> float:
    """Seconds of a step of the usual loop: pinned copies, autocast, one epoch."""
    torch.manual_seed(0)
    network, loss = case.make().to(device), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    total = torch.zeros((), device=device)
    stamps: list[float] = []
    for batch in batches(case, device):
        inputs, target = (tensor.to(device, non_blocking=True) for tensor in batch)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            value = loss(network(inputs), target)
        value.backward()
        optimizer.step()
        total += value.detach()
        stamps.append(time.perf_counter())
    wait_for(device)
    return steady_step_s(stamps, time.perf_counter())


def batches(case: Case, device: torch.device) -> Any:
    order = torch.split(torch.randperm(len(case.tensors[0])), case.batch)
    for rows in order:
        picked = [tensor[rows] for tensor in case.tensors]
        yield [tensor.pin_memory() for tensor in picked] if device.type == "cuda" else picked


def our_step_s(case: Case, device: torch.device, directory: Path, *more: Callback) -> float:
    stamps = Stamps(device)
    arguments = (
        *case.overrides,
        f"data.global_batch_size={case.batch}",
        f"data.datasets.samples={len(case.tensors[0])}",
        f"trainer.accelerator={'gpu' if device.type == 'cuda' else 'cpu'}",
        "trainer.precision=bf16-mixed",
        "launch.threads=null",
    )
    outcome_of(arguments, directory, [stamps, *more])
    return steady_step_s(stamps.ends, stamps.over)


class Stamps(Callback):
    """When each step was asked for, and when the device was done with all of them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.ends, self.over = device, list[float](), 0.0

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_train_epoch_end(self, *args: Any) -> None:
        wait_for(self.device)
        self.over = time.perf_counter()


def steady_step_s(stamps: list[float], over: float) -> float:
    """Mean seconds of the steps after the first third: from asking for one to the device's end."""
    first = len(stamps) // 3
    return (over - stamps[first]) / (len(stamps) - 1 - first)


def trace(case: Case, device: torch.device, directory: Path) -> dict[str, Any]:
    """What a profile of our steps shows: waits a step, and the share of copies that are hidden."""
    if device.type != "cuda":
        our_step_s(case, device, directory)
        return {"waits a step": None, "copies hidden": None}
    tracer = Tracer()
    our_step_s(case, device, directory, tracer)
    return tracer.found()


class Tracer(Callback):
    """Profiles ``STEPS`` steady steps."""

    FIRST, STEPS = 10, 10
    WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")
    """The host stands still until the GPU is done. `cudaEventSynchronize`, for one event of the
    step's middle, is counted apart: the GPU has work while the host waits."""

    def __init__(self) -> None:
        self._profile: Any = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.FIRST:
            self._profile.start()
        elif batch_idx == self.FIRST + self.STEPS:
            self._profile.stop()

    def found(self) -> dict[str, Any]:
        events = self._profile.events()
        calls = [event.name for event in events]
        on_gpu = [event for event in events if event.device_type == DeviceType.CUDA]
        copies = [span(e) for e in on_gpu if "Memcpy HtoD" in e.name]
        kernels = sorted(span(e) for e in on_gpu if "Memcpy" not in e.name)
        copied = sum(end - start for start, end in copies)
        hidden = sum(overlap(copy, kernels) for copy in copies)
        return {
            "waits a step": sum(name in self.WAITS for name in calls) / self.STEPS,
            "waits for an event a step": calls.count("cudaEventSynchronize") / self.STEPS,
            "copies hidden": round(hidden / copied, 2) if copied else None,
        }


def span(event: Any) -> tuple[float, float]:
    return event.time_range.start, event.time_range.end


def overlap(copy: tuple[float, float], kernels: list[tuple[float, float]]) -> float:
    """How long kernels, which do not overlap each other, ran during a copy."""
    return sum(max(0.0, min(copy[1], end) - max(copy[0], start)) for start, end in kernels)


def operations_of(case: Case) -> float:
    """Floating-point operations of one step: forward and backward, as torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    network, few = case.make(), min(2, case.batch)
    inputs: Tensor = case.tensors[0][:few]
    with FlopCounterMode(display=False) as counter:
        nn.CrossEntropyLoss()(network(inputs), case.tensors[1][:few]).backward()
    return float(counter.get_total_flops()) * case.batch / few


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
