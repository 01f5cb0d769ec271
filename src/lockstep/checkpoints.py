"""Checkpoints that are whole or not there, and that say how far training had come."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from torch import nn
from typing_extensions import override

from lockstep.errors import UsageError
from lockstep.results import replacing

COMPILED = "_orig_mod."
"""What `torch.compile` puts into the names of a compiled network's parameters."""


class AtomicCheckpoints(TorchCheckpointIO):
    """Write beside the file, then rename: a full disk or a kill leaves the previous checkpoint.

    Lightning builds the file in memory and in the system's temporary directory; a move from there
    to another file system copies, and a copy can be cut short. Only for local paths.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None
    ) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with replacing(Path(path)) as temporary, _Remembering(temporary, "w") as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:  # torch's words for a write that failed
                raise file.problem or error from None
            os.fsync(file.fileno())

    @override
    def load_checkpoint(
        self, path: _PATH, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        with _plain_or_refused(path):
            loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
        return loaded


@contextmanager
def _plain_or_refused(path: _PATH) -> Iterator[None]:
    """Say what is wrong with a checkpoint that does not load; torch's advice is to run it."""
    try:
        yield
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        # A message of many lines: the one that says what was found, where there is one.
        told = [line for line in str(error).splitlines() if "Unsupported" in line or ":" in line]
        raise UsageError(
            f"{path} must be a checkpoint of plain tensors and containers; reading it failed with "
            f"{type(error).__name__}: {(told or [str(error)])[0].strip()} Name another one. "
            "Loading anything else could run code that somebody put there."
        ) from error


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """What a checkpoint file holds, on the CPU. Raises `UsageError` if it is not plain."""
    with _plain_or_refused(path):
        state = torch.load(path, map_location="cpu", weights_only=True)
    return state if isinstance(state, dict) else {}


class _Remembering(io.FileIO):
    """A file that keeps why a write failed; torch's writer says only that one did."""

    problem: OSError | None = None

    @override
    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            written = 0
            while written < len(view):  # a disk that fills up takes a part
                written += super().write(view[written:])
        except OSError as error:
            self.problem = OSError(error.errno, error.strerror, self.name)
            raise
        return written


def save_between_steps(trainer: Trainer, path: Path) -> None:
    """Save while a step is under way that has not touched the weights: it has to be done again.

    On every rank, or on rank zero alone when the run has broken.
    """
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    loop = checkpoint["loops"]["fit_loop"]
    done = loop["epoch_loop.batch_progress"]["current"]["processed"]
    # The gradients of an accumulation that was not finished are lost: its batches come again.
    rewind(loop, done - done % trainer.accumulate_grad_batches)
    if trainer.is_global_zero:
        trainer.strategy.checkpoint_io.save_checkpoint(checkpoint, str(path))


def rewind(loop: dict[str, Any], batches: int) -> None:
    """Make a fit loop's state that of a checkpoint after ``batches`` batches of the epoch.

    Lightning's loops restart right from two places: the end of a batch, and the end of an epoch.
    """
    progress, epoch = loop["epoch_loop.batch_progress"], loop["epoch_progress"]
    for loader in loop["state_dict"].get("combined_loader", []):
        loader["batches"] = batches
    begun = progress["current"]["ready"] - batches
    completed = batches - 1 if batches else 0
    for counts in (progress["total"], progress["current"]):
        counts["ready"] -= begun
        counts["started"] = counts["processed"] = counts["ready"]
        counts["completed"] = counts["ready"] - (batches - completed)
    progress["is_last_batch"] = False
    if batches:
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1  # Lightning adds it again
        return
    for counts in (epoch["total"], epoch["current"]):
        counts["ready"] = counts["started"] = counts["processed"]
        counts["completed"] = counts["processed"] - 1


def end_epoch_when_resumed(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """A checkpoint of an epoch's last batch, saved before the epoch's validation: do that first.

    Lightning takes such an epoch for done, and would leave out its validation and its metrics.
    """
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    counts = epoch_loop.batch_progress.current
    if not trainer.training or not trainer.is_last_batch or counts.completed == counts.processed:
        return
    loop = checkpoint["loops"]["fit_loop"]
    progress = loop["epoch_loop.batch_progress"]
    for count in (progress["total"], progress["current"]):
        count["completed"] = count["processed"]
    if epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
        begun = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
        loop["epoch_loop.val_loop.batch_progress"]["total"] = begun
        loop["epoch_loop.val_loop.batch_progress"]["current"] = dict.fromkeys(begun, 0)
    else:
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] += 1  # Lightning adds none


def keep_names_plain(module: nn.Module) -> None:
    """Save a compiled network's weights by the names that it has uncompiled, and load either.

    A checkpoint then loads with and without `torch.compile`, and in plain torch.
    """
    module.register_state_dict_post_hook(_plain_names)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_own_names)  # type: ignore[no-untyped-call]


def _plain_names(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
    for name in [name for name in state if COMPILED in name]:
        state[name.replace(COMPILED, "")] = state.pop(name)


def _own_names(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    own = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    for name in own:
        plain = prefix + name.replace(COMPILED, "")
        if COMPILED in name and plain in state:
            state[prefix + name] = state.pop(plain)
