"""Classify images: cross entropy, accuracy, a confusion matrix."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix
from typing_extensions import override

from lockstep.data import train_split
from lockstep.errors import UsageError
from lockstep.module import SupervisedModule

log = logging.getLogger(__name__)


class ImageClassifier(SupervisedModule):
    """A batch is images and their classes ``(B,)``; ``network`` returns logits ``(B, classes)``.

    Raises `UsageError` where the data has another number of classes. ``metrics`` are measured
    beside ``accuracy``, the share of right answers, and ``confusion``, rows true and columns
    predicted.
    """

    def __init__(
        self,
        network: nn.Module,
        classes: int,
        optimizer: Callable[[Any], Optimizer],
        scheduler: Callable[[Optimizer], Any] | None = None,
        label_smoothing: float = 0.0,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        standard: dict[str, Metric] = {
            "accuracy": MulticlassAccuracy(classes, average="micro"),
            "confusion": MulticlassConfusionMatrix(classes),
        }
        loss = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        super().__init__(network, loss, optimizer, scheduler, {**standard, **(metrics or {})})
        self.classes = classes

    @override
    def on_fit_start(self) -> None:
        self._check_classes()
        replicas = getattr(self.trainer.strategy, "parallel_devices", [])  # of dp, too
        split = self.trainer.world_size > 1 or len(replicas) > 1
        norms = [part for part in self.network.modules() if isinstance(part, _BatchNorm)]
        own = any(not isinstance(norm, nn.SyncBatchNorm) for norm in norms)
        if own and split and self.trainer.is_global_zero:
            log.info(
                "BatchNorm normalizes the samples of one device, a share of the batch: the result "
                "differs a little from that of one device; GroupNorm's does not"
            )

    def _check_classes(self) -> None:
        names = getattr(train_split(self.trainer), "classes", None)
        if names is not None and len(names) != self.classes:
            few = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise UsageError(
                "model.classes must be the number of classes in the data; got "
                f"{self.classes} and {len(names)} ({few}). Use model.classes={len(names)}."
            )
