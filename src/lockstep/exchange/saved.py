"""What an exchange keeps between steps, in checkpoints and back."""

from __future__ import annotations

import logging
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lockstep.strategies.exact_ddp import ExactDDPStrategy

log = logging.getLogger(__name__)

KEY = "exchange"


class SavedExchangeStrategy(ExactDDPStrategy):
    """ddp with something between steps that a resumed run needs, beside weights and optimizers.

    A subclass has `exchange_state` and `load_exchange_state`.
    """

    saved_as = ""
    """Who wrote a state: another way of exchanging does not read it."""

    def exchange_state(self) -> dict[str, Any] | None:
        """Plain types and tensors, the same on every rank; all ranks call it at once."""
        raise NotImplementedError

    def load_exchange_state(self, state: dict[str, Any]) -> None:
        """Take up what `exchange_state` returned, in a run with as many ranks."""
        raise NotImplementedError

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits and not any(isinstance(callback, SaveExchange) for callback in callbacks):
            callbacks.append(SaveExchange(self))

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Called when weights are loaded, and optimizers and ranks are there."""
        super().load_optimizer_state_dict(checkpoint)
        saved = checkpoint.get(KEY)
        here = {"by": self.saved_as, "ranks": self.world_size}
        if saved is not None and {"by": saved["by"], "ranks": saved["ranks"]} == here:
            self.load_exchange_state(saved["state"])
        elif self.is_global_zero:
            log.info(
                "%s begins anew: the checkpoint holds nothing of it for %d ranks",
                self.saved_as,
                self.world_size,
            )


class SaveExchange(Callback):
    """Put a strategy's state into each checkpoint."""

    def __init__(self, strategy: SavedExchangeStrategy) -> None:
        self._strategy = strategy

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.interrupted:  # rank zero is alone; KeepLastGood tells this and goes on
            raise RuntimeError(
                f"{self._strategy.saved_as} needs all ranks to save, and the run has broken; the "
                "newest checkpoint before it is whole"
            )
        state = self._strategy.exchange_state()
        if state is not None:
            saved = {"by": self._strategy.saved_as, "ranks": trainer.world_size, "state": state}
            checkpoint[KEY] = saved
