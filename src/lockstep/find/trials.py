"""The fewest micro-steps that a device bears, found by real steps of growing size."""

from __future__ import annotations

import copy
import csv
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sized
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lockstep.build import Built
from lockstep.callbacks.guards import FiniteLoss
from lockstep.data import DataModule
from lockstep.errors import UsageError
from lockstep.find.alone import alone, undone
from lockstep.find.batch import FindBatch
from lockstep.find.division import Division, divisions, largest
from lockstep.find.memory import Meter, ran_out
from lockstep.group import gather
from lockstep.outcome import callbacks_of
from lockstep.record import Run
from lockstep.results import Result
from lockstep.strategies.data_parallel import DataParallelStrategy

log = logging.getLogger(__name__)


class Trials(Callback):
    """In the place of the first epoch: this rank's trials, in steps that Lightning makes."""

    def __init__(self, asked: FindBatch, ways: list[Division], data: DataModule) -> None:
        self._asked, self._ways, self._data = asked, ways, data
        self.place: int | None = None
        self.rows: list[tuple[int, bool, int | None]] = []
        """Samples of this process, whether they fit, and the peak in bytes."""

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        meter = Meter(devices_of(trainer), self._asked.limit_bytes)
        accumulated = trainer.accumulate_grad_batches

        def fits(way: Division) -> bool:
            trainer.accumulate_grad_batches = way.micro_steps
            meter.start()
            fitted = self._ran(trainer, pl_module, way)
            peak = meter.peak_bytes()
            fitted = fitted and meter.within_limit(peak)
            self.rows.append((way.per_process, fitted, peak))
            return fitted

        try:
            with alone(trainer):
                self.place = largest(self._ways, fits)
        finally:
            trainer.accumulate_grad_batches = accumulated
        raise StopIteration  # Lightning's own way to leave an epoch

    def _ran(self, trainer: Trainer, module: LightningModule, way: Division) -> bool:
        try:
            with undone(trainer, module):
                for i, batch in enumerate(islice(self._batches(way), self._asked.steps_per_trial)):
                    # Of an accumulation, a micro-step that is not its first one: beside it there
                    # are the gradients of those before.
                    step(trainer, module, batch, min(i, 1))
        except RuntimeError as error:
            if not ran_out(error):
                raise
            return False
        return True

    def _batches(self, way: Division) -> Iterator[Any]:
        """What the run with this division would be given, read in this process."""
        data = copy.copy(self._data)
        data.sizes = replace(data.sizes, global_=way.global_batch_size, per_process=way.per_process)
        data.config = replace(data.config, num_workers=0)
        while True:
            yield from data.train_dataloader()


def step(trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
    """Forward, backward and optimizer, with the Trainer's precision and clipping."""
    loop = trainer.fit_loop.epoch_loop
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
    arguments = loop._build_kwargs(OrderedDict(), batch, index)
    loop.automatic_optimization.run(trainer.optimizers[0], index, arguments)


def devices_of(trainer: Trainer) -> list[Any]:
    strategy = trainer.strategy
    if isinstance(strategy, DataParallelStrategy):
        return strategy.parallel_devices
    return [strategy.root_device]


def find_batch(asked: FindBatch, built: Built, run: Run) -> Result:
    """Raises `UsageError` where no size can be set from outside, and where none fits."""
    trainer, module, data = built.trainer, built.module, built.data
    refuse_unsuited(module, data)
    assert isinstance(data, DataModule)
    # BatchNorm cannot be trained on one sample.
    least = 2 * len(devices_of(trainer)) if has_batch_norm(module) else 1
    ways = divisions(run.sizes.effective, trainer.world_size, samples_of(data), least)
    trials = Trials(asked, ways, data)
    kept = [item for item in callbacks_of(trainer) if not isinstance(item, FiniteLoss)]
    trainer.callbacks = [*kept, trials]  # type: ignore[attr-defined]
    trainer.fit(module, datamodule=data)
    of_ranks = gather((trials.place, trials.rows))
    path = run.directory / "find_batch.csv"
    if trainer.is_global_zero:
        write_table(path, [rows for _, rows in of_ranks])
    found = ways[smallest([place for place, _ in of_ranks], ways)]
    if trainer.is_global_zero:
        for remark in remarks(found, run, samples_of(data), module):
            log.info("%s", remark)
        log.info("use: %s", found.overrides)
    return {
        "metrics": {
            "find/global_batch_size": found.global_batch_size,
            "find/accumulate_grad_batches": found.micro_steps,
        },
        "output": str(path),
    }


def smallest(places: list[int | None], ways: list[Division]) -> int:
    """What fits on every rank; raises `UsageError` where one has nothing."""
    if None in places:
        raise UsageError(
            f"find=batch found no batch that fits: one of {ways[0].per_process} is too much for "
            f"rank {places.index(None)}. Use features=recompute, trainer.precision=bf16-mixed or a "
            "smaller network; or split it: strategy=fsdp."
        )
    return min(place for place in places if place is not None)


def samples_of(data: DataModule) -> int:
    assert isinstance(data.splits.train, Sized)
    return len(data.splits.train)


def refuse_unsuited(module: LightningModule, data: Any) -> None:
    if not module.automatic_optimization:
        raise UsageError(
            "find=batch answers by trainer.accumulate_grad_batches, which Lightning does for "
            f"modules that it steps; {type(module).__name__}.automatic_optimization is false. Try "
            "data.global_batch_size with a short run: trainer.max_steps=3."
        )
    if not isinstance(data, DataModule):
        raise UsageError(
            "find=batch sets the batch size of data sets in lockstep.data.Splits; "
            f"{type(data).__name__} makes its own batches. Return Splits from data.datasets, or "
            "try its own batch size with a short run: trainer.max_steps=3."
        )


def remarks(found: Division, run: Run, samples: int, module: LightningModule) -> Iterator[str]:
    """Where a run with this division is not the run that the config says."""
    if found.global_batch_size == run.sizes.global_:
        return
    if rest := samples % run.sizes.effective:
        yield (
            f"an epoch's last optimizer step has {rest} of {run.sizes.effective} samples: "
            "Lightning divides an accumulation by its full number of micro-steps, so that step is "
            "another one than without"
        )
    if has_batch_norm(module):
        yield "BatchNorm normalizes each micro-step by itself"


def has_batch_norm(module: LightningModule) -> bool:
    return any(isinstance(part, _BatchNorm) for part in module.modules())


def write_table(path: Path, of_ranks: list[list[tuple[int, bool, int | None]]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("rank", "size", "fits", "peak_memory_bytes"))
        for rank, rows in enumerate(of_ranks):
            writer.writerows((rank, size, int(fits), peak) for size, fits, peak in rows)
