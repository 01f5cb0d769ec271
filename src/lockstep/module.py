"""The one LightningModule: a network, a loss, an optimizer and metrics, all from the config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lockstep.data.sharding import EvalShards
from lockstep.epoch_mean import EpochMean
from lockstep.schedules import scheduled
from lockstep.strategies.exact_ddp import batch_weight

Batch = tuple[Tensor, ...]


class SupervisedModule(LightningModule):
    """Train ``network`` to make ``loss(network(*inputs), target)`` small.

    A batch is ``(*inputs, target)``, each with the samples on dimension 0, and ``loss`` returns
    the mean over these samples: that is what makes the result independent of the number of
    processes (a sum would grow with a process's share). For another way from a batch to a loss,
    override `predict_and_loss`; everything else stays.

    ``metrics`` maps names to torchmetrics objects; they are called as ``metric(prediction,
    target)`` in validation and test. ``optimizer`` takes the parameters and returns an optimizer;
    ``scheduler`` takes that optimizer and is stepped once per epoch or, where it takes
    ``total_steps``, once per optimizer step; see `lockstep.schedules`.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: Callable[[Any, Tensor], Tensor],
        optimizer: Callable[[Any], Optimizer],
        scheduler: Callable[[Optimizer], Any] | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.loss = loss
        self._make_optimizer, self._make_scheduler = optimizer, scheduler
        collection = MetricCollection(dict(metrics or {}))
        self.train_loss, self.val_loss, self.test_loss = EpochMean(), EpochMean(), EpochMean()
        self.val_metrics = collection.clone(prefix="val/")
        self.test_metrics = collection.clone(prefix="test/")
        self._unchecked = self._without_target = False
        self.tables: dict[str, list[Any]] = {}
        """The last value of each metric that is more than one number."""

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning notes the hook it is in, 30 times a step; torch looks each time whether it is a
        # parameter.
        if name == "_current_fx_name":
            vars(self)[name] = value
        else:
            super().__setattr__(name, value)

    @override
    def forward(self, *inputs: Tensor) -> Any:
        return self.network(*inputs)

    def predict_and_loss(self, batch: Batch) -> tuple[Any, Tensor, int]:
        """Return the prediction, the mean loss (a 0-dim tensor) and the number of samples."""
        *inputs, target = batch
        prediction = self(*inputs)
        return prediction, self.loss(prediction, target), len(target)

    @override
    def on_train_start(self) -> None:
        self._unchecked = self.trainer.world_size > 1

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        prediction, loss, samples = self.predict_and_loss(batch)
        if self._unchecked:
            self._unchecked = False
            self._check_mean(prediction, batch[-1], loss)
        self.train_loss.update(loss, samples if batch_weight(self.trainer) else 0)
        return loss

    @override
    def on_train_epoch_end(self) -> None:
        self.log("train/loss", self.train_loss)

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        counts = not _only_filler(self.trainer.val_dataloaders)
        self._evaluate(batch, self.val_loss, self.val_metrics, counts)

    @override
    def on_validation_epoch_end(self) -> None:
        self.log("val/loss", self.val_loss)
        self._log_metrics(self.val_metrics)

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        counts = not _only_filler(self.trainer.test_dataloaders)
        self._evaluate(batch, self.test_loss, self.test_metrics, counts)

    @override
    def on_test_epoch_end(self) -> None:
        self.log("test/loss", self.test_loss)
        self._log_metrics(self.test_metrics)

    @override
    def on_predict_start(self) -> None:
        data = getattr(self.trainer, "datamodule", None)
        self._without_target = getattr(data, "predicts_without_target", False)

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Samples to predict may lack the target."""
        columns = (batch,) if isinstance(batch, Tensor) else batch
        return self(*(columns if self._without_target else columns[:-1]))

    @override
    def configure_optimizers(self) -> Any:
        optimizer = self._make_optimizer(self.parameters())
        return scheduled(optimizer, self._make_scheduler, self.trainer)

    @torch.no_grad()
    def _check_mean(self, prediction: Any, target: Tensor, loss: Tensor) -> None:
        """A mean stays what it is when each sample comes twice; a sum doubles."""
        if not isinstance(prediction, Tensor):
            return
        twice = self.loss(prediction.repeat_interleave(2, 0), target.repeat_interleave(2, 0))
        if not torch.allclose(twice, loss, rtol=1e-3):
            rank_zero_warn(
                "The loss must be a mean over the samples, so that gradients do not depend on the "
                f"number of processes; with each sample twice it goes from {loss.item():.4g} to "
                f"{twice.item():.4g}. Use reduction='mean', or divide by the number of samples."
            )

    def _evaluate(
        self, batch: Batch, mean: EpochMean, metrics: MetricCollection, counts: bool
    ) -> None:
        prediction, loss, samples = self.predict_and_loss(batch)
        if counts:
            mean.update(loss, samples)
            metrics.update(prediction, batch[-1])
        else:
            # No rows, of the right type: ranks exchange lists of predictions by their bytes.
            metrics.update(*tree_map(lambda rows: rows[:0], (prediction, batch[-1])))

    def _log_metrics(self, metrics: MetricCollection) -> None:
        """Compute over all ranks, once; log numbers, keep tables such as a confusion matrix."""
        values = metrics.compute()
        for name, metric in metrics.items():
            if values[name].numel() == 1:
                self.log(name, metric)  # Lightning takes the computed value, and resets
            else:
                self.tables[name] = values[name].tolist()
                metric.reset()


def _only_filler(loader: Any) -> bool:
    """This rank has no share of the data set; see `EvalShards`."""
    sampler = getattr(loader, "sampler", None)
    return isinstance(sampler, EvalShards) and sampler.only_filler
