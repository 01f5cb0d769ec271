"""Count what each rank sends over gloo while it trains, whether Python or DDP's C++ asks for it."""

from __future__ import annotations

import gc
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile, record_function

PAYLOAD = {"gloo:all_reduce": "all_reduce", "gloo:send": "send", "gloo:recv": "receive"}
BYTES = {"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2}
"""Of a number of weights or gradients; what is counted or asked travels as integers."""


class Traffic(Callback):
    """Write, per rank, the bytes of floating-point numbers by kind of message, and last weights.

    ``after_steps`` are left out: some strategies begin in another way than they go on.
    """

    kinds: ClassVar[dict[str, str]] = PAYLOAD

    def __init__(self, directory: str, after_steps: int = 0) -> None:
        self.directory, self.after_steps = Path(directory), after_steps
        self.profiler: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Come first: what the other callbacks exchange when training has ended is no step's."""
        callbacks: list[Callback] = trainer.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.profiler is not None or trainer.global_step < self.after_steps:
            return
        # PowerSGD goes on in gloo's threads when a message has come.
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self.profiler = profile(
            activities=[ProfilerActivity.CPU], record_shapes=True, experimental_config=everywhere
        )
        self.profiler.start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.profiler.stop()
        moved: Counter[str] = Counter(dict.fromkeys(self.kinds.values(), 0))
        for event in self.counted(self.profiler.events()):
            kind = self.kinds.get(event.name)
            if kind and event.input_dtypes[0] in BYTES:
                moved[kind] += math.prod(event.input_shapes[0]) * BYTES[event.input_dtypes[0]]
        (self.directory / f"traffic{trainer.global_rank}.json").write_text(json.dumps(moved))
        # It refers weakly to each tensor whose shape it has noted, and no DTensor that something
        # refers to can be moved to a device: "Couldn't swap Linear.weight".
        self.profiler = None
        gc.collect()

    def counted(self, events: Any) -> Any:
        return events

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        weights = [item.detach() for item in pl_module.parameters()]
        torch.save(weights, self.directory / f"weights{trainer.global_rank}.pt")


class StepTraffic(Traffic):
    """Of a network in parts: its steps only, as it exchanges in validation, too; no weights."""

    kinds: ClassVar[dict[str, str]] = {
        **PAYLOAD,
        "gloo:all_gather": "all_gather",
        "gloo:broadcast": "broadcast",
    }
    step: Any = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.step = record_function("a step")
        self.step.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.step.__exit__(None, None, None)

    def counted(self, events: Any) -> Any:
        steps = [event.time_range for event in events if event.name == "a step"]
        return [
            event
            for event in events
            if any(step.start <= event.time_range.start <= step.end for step in steps)
        ]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Each rank has its own."""


def traffic(directory: Path) -> list[dict[str, int]]:
    """What each rank wrote, in rank order."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob("traffic*.json"))]


def ranks_agree(directory: Path) -> bool:
    """All ranks ended with the same weights, bit for bit."""
    first, *others = (torch.load(path) for path in directory.glob("weights*.pt"))
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
