"""Predictions of all ranks as one file, in the order of the data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lockstep.data import DataModule
from lockstep.data.sharding import share_of_data
from lockstep.results import replacing


def write_predictions(
    trainer: Trainer, module: LightningModule, data: DataModule, ckpt_path: str | None, run: Path
) -> Path:
    """Predict each sample once and write ``predictions.pt``: rows in data set order.

    What ``predict_step`` returns may be any nesting of tensors ``(B, ...)``; the file holds the
    same nesting with ``(samples, ...)`` and loads with ``weights_only=True``. Ranks hand their rows
    over in files in the run's directory, so that no rank holds more than it must.
    """
    batches = trainer.predict(module, datamodule=data, ckpt_path=ckpt_path)
    assert batches is not None
    rank, world_size, leads = share_of_data(trainer)
    if leads:
        torch.save(_concatenate(batches), run / f"predictions.{rank}.part")
    trainer.strategy.barrier("predictions")
    path = run / "predictions.pt"
    if trainer.is_global_zero:
        parts = [run / f"predictions.{other}.part" for other in range(world_size)]
        samples = data.predict_samples
        rows = [torch.load(part, weights_only=True) for part in parts[:samples]]
        with replacing(path) as temporary:
            torch.save(interleave(rows, samples), temporary)
        for part in parts:
            part.unlink()
    trainer.strategy.barrier("predictions")
    return path


def interleave(shards: list[Any], samples: int) -> Any:
    """Undo `EvalShards`: row i of shard r is sample ``r + i * len(shards)``."""

    def merge(*leaves: Tensor) -> Tensor:
        merged = leaves[0].new_empty((samples, *leaves[0].shape[1:]))
        for rank, leaf in enumerate(leaves):
            merged[rank :: len(leaves)] = leaf
        return merged

    return tree_map(merge, *shards)


def _concatenate(batches: list[Any]) -> Any:
    leaves, structure = zip(*(tree_flatten(batch) for batch in batches), strict=True)
    columns = [torch.cat(column).cpu() for column in zip(*leaves, strict=True)]
    return tree_unflatten(columns, structure[0])
