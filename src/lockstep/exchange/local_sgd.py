"""``local_sgd``: each rank takes ``period`` steps of its own, then weights are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from typing_extensions import override

from lockstep.errors import UsageError
from lockstep.exchange.local_steps import LocalStepsStrategy, mean_over_ranks
from lockstep.group import gather
from lockstep.traffic import size_of, through_ring


class LocalSGDStrategy(LocalStepsStrategy):
    """Average after every ``period``-th step, and after the last one of an epoch (Stich 2019,
    https://arxiv.org/abs/1805.09767).

    PeriodicModelAverager of torch is not used: it counts steps on its own, so that a resumed run
    would average elsewhere. What is averaged are parameters and floating-point buffers; optimizers
    keep their own moments. Between two averages evaluation and checkpoints get the average, and
    training goes on from what each rank has: the result does not depend on how often a run is
    evaluated or saved.
    """

    saved_as = "local_sgd"

    def __init__(self, *args: Any, period: int = 8, **kwargs: Any) -> None:
        if not isinstance(period, int) or isinstance(period, bool) or period < 1:
            raise UsageError(
                f"strategy.options.period must be a whole number of steps, at least 1; got "
                f"{period!r}. Use 1 to average after each step."
            )
        # Else DDP copies rank 0's buffers to the others before each forward.
        super().__init__(*args, **{"forward_sync_buffers": False} | kwargs)
        self.period = period
        self.differs = (
            f"ranks average every {period} steps; results depend on the number of processes"
        )
        self._apart = False
        """Ranks have taken steps since they last averaged."""
        self._own: dict[str, Tensor] | None = None
        """This rank's weights while the module holds the average for an evaluation."""

    def bytes_per_step(self) -> float:
        """That each link of the ring moves, a mean over the steps of a period."""
        payload = size_of(value for _, value in self._averaged())
        return through_ring(payload, self.world_size) / self.period

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._apart = self.world_size > 1
        if self.ends_here() or (self._trainer().global_step + 1) % self.period == 0:
            self._average()
        return output

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._apart:
            self._own = {name: value.clone() for name, value in self._averaged()}
            self._put(self._mean())

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._own is not None:
            self._put(self._own)
            self._own = None

    @override
    def on_train_end(self) -> None:
        self._average()
        super().on_train_end()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """With the average of the ranks; all of them call this at once."""
        state = super().lightning_module_state_dict()
        if self._apart and self._own is None and not self._trainer().interrupted:
            mean = self._mean()
            state = {name: mean.get(name, value) for name, value in state.items()}
        return state

    @override
    def exchange_state(self) -> dict[str, Any]:
        own = None
        if self._apart:
            here = self._own or dict(self._averaged())
            own = gather({name: value.detach().cpu() for name, value in here.items()})
        moments = gather([_on_cpu(optimizer.state_dict()) for optimizer in self.optimizers])
        return {"own": own, "optimizers": moments}

    @override
    def load_exchange_state(self, state: dict[str, Any]) -> None:
        if state["own"] is not None:
            self._put(state["own"][self.global_rank])
            self._apart = self.world_size > 1
        for optimizer, saved in zip(
            self.optimizers, state["optimizers"][self.global_rank], strict=True
        ):
            optimizer.load_state_dict(saved)

    def _average(self) -> None:
        if self._apart:
            self._put(self._mean())
        self._apart = False

    def _mean(self) -> dict[str, Tensor]:
        names, tensors = zip(*self._averaged(), strict=True)
        return dict(zip(names, mean_over_ranks(list(tensors)), strict=True))

    def _averaged(self) -> Iterator[tuple[str, Tensor]]:
        """By name, the storage itself: parameters and floating-point buffers."""
        module = self._own_module()
        yield from ((name, item.data) for name, item in module.named_parameters())
        yield from ((n, item) for n, item in module.named_buffers() if item.is_floating_point())

    def _put(self, values: dict[str, Tensor]) -> None:
        for name, place in self._averaged():
            place.copy_(values[name])


def _on_cpu(state: Any) -> Any:
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, state)
