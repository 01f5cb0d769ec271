"""What the test predicted for its first samples, from the very batches that were measured."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lockstep.data.sharding import EvalShards, share_of, share_of_data
from lockstep.group import gather
from lockstep.predictions import interleave

NUMBERS = 2000
"""Samples kept where a prediction is a number."""
OTHERS = 16
"""Samples kept of images, texts and everything else."""
LONGEST = 96
"""Tokens kept of a text."""


class Samples:
    """The first samples of the test split, each with what was predicted for it.

    Share r of the data is every W-th sample, so its first rank keeps the first of them; `collect`
    puts them in the order of the data set, the same for every number of ranks. Takes part in the
    module's ``predict_and_loss`` while it is open: nothing is computed twice.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        loader: Any = trainer.test_dataloaders
        sampler = getattr(loader, "sampler", None)
        self._module: Any = module
        self._rank, self._world_size, self._leads = share_of_data(trainer)
        self.usable = isinstance(sampler, EvalShards) and hasattr(module, "predict_and_loss")
        self._total = sampler.samples if isinstance(sampler, EvalShards) else 0
        self._empty = isinstance(sampler, EvalShards) and sampler.only_filler
        self._parts: list[dict[str, Tensor]] = []
        self._kept = 0
        if self.usable:
            self._original: Any = self._module.predict_and_loss
            vars(module)["predict_and_loss"] = self._predict_and_loss

    def _predict_and_loss(self, batch: Any) -> Any:
        prediction, loss, count = self._original(batch)
        self._keep(batch, prediction)
        return prediction, loss, count

    @torch.no_grad()
    def _keep(self, batch: Any, prediction: Any) -> None:
        if not isinstance(prediction, Tensor):
            return
        *inputs, target = batch
        limit = NUMBERS if is_number(prediction, target) else OTHERS
        room = share_of(min(limit, self._total), self._rank, self._world_size) - self._kept
        rows = min(room, len(target))
        if rows > 0 and not self._empty:
            columns = columns_of(inputs[0][:rows], prediction[:rows], target[:rows])
            self._parts.append({name: column.cpu().clone() for name, column in columns.items()})
            self._kept += rows

    def close(self) -> None:
        """Let the module be as it was."""
        vars(self._module).pop("predict_and_loss", None)

    def collect(self) -> dict[str, Tensor]:
        """On every rank: columns with a row per sample; empty where there is nothing to show."""
        shards = gather(joined(self._parts) if self._leads else {})
        held = [shard for shard in shards if shard]
        if not held:
            return {}
        widest = {
            name: max(s[name].shape[1] for s in held) for name in held[0] if held[0][name].ndim == 2
        }
        held = [
            {name: widened(column, widest.get(name)) for name, column in shard.items()}
            for shard in held
        ]
        columns: dict[str, Tensor] = interleave(held, sum(len(shard["target"]) for shard in held))
        return columns


def is_number(prediction: Tensor, target: Tensor) -> bool:
    """A floating-point value for each sample, predicted and true."""
    rows = len(target)
    return target.is_floating_point() and prediction.numel() == target.numel() == rows


def columns_of(inputs: Tensor, prediction: Tensor, target: Tensor) -> dict[str, Tensor]:
    """What is kept of N samples, by what they are.

    Numbers: ``predicted`` and ``target`` ``(N,)``. Classes of scores ``(N, C)``: the most likely
    class, its probability ``sure`` and the true one's ``rank`` from 1; texts to continue, scores
    ``(N, T, V)``: the most likely tokens ``(N, T)``.
    """
    if is_number(prediction, target):
        return {"predicted": prediction.reshape(-1).float(), "target": target.reshape(-1).float()}
    if target.is_floating_point() or prediction.ndim != target.ndim + 1:
        return {"target": target.reshape(len(target), -1)[:, 0]}
    columns = {"predicted": prediction.argmax(-1), "target": target}
    if target.ndim == 1:
        scores = prediction.float()
        own = scores.gather(1, target[:, None])
        columns |= {"rank": (scores > own).sum(1) + 1, "sure": scores.softmax(1).amax(1)}
        if inputs.ndim == 4 and inputs.shape[1] in (1, 3):
            columns["images"] = inputs.float()
    else:
        columns = {name: column[:, :LONGEST] for name, column in columns.items()}
        columns["tokens"] = inputs[:, :LONGEST]
    return columns


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Batches as one; texts are padded on the right to the longest, with -1."""
    if not parts:
        return {}
    columns = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts]
        width = max(piece.shape[1] for piece in pieces) if pieces[0].ndim == 2 else None
        columns[name] = torch.cat([widened(piece, width) for piece in pieces])
    return columns


def widened(column: Tensor, width: int | None) -> Tensor:
    if width is None or column.ndim != 2:
        return column
    return torch.nn.functional.pad(column, (0, width - column.shape[1]), value=-1)
