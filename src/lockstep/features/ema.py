"""An exponential moving average of the weights that works under every strategy."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.optim.swa_utils import get_ema_avg_fn
from typing_extensions import override


class MovingAverage(EMAWeightAveraging):
    """Lightning's callback, on the device that trains, and fit to be sent to ``ddp_spawn``.

    Validation, test and the weights of checkpoints are the average's; training goes on with its
    own, which checkpoints hold as ``current_model_state``. Lightning makes the average before the
    module is on its device, and would copy each step's weights from there to the CPU; and holds a
    function that cannot be pickled from the start.
    """

    def __init__(self, decay: float = 0.999, **options: Any) -> None:
        super().__init__(decay=decay, **options)
        self._decay = decay
        del self._kwargs["avg_fn"]

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._device is None:
            self._device = trainer.strategy.root_device
        self._kwargs["avg_fn"] = get_ema_avg_fn(self._decay)  # type: ignore[no-untyped-call]
        super().setup(trainer, pl_module, stage)
