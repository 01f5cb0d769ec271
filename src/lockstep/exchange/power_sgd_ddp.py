"""``strategy.options.hook=power_sgd``: ddp with low-rank gradients, resumed as it was."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lockstep.errors import UsageError
from lockstep.exchange.power_sgd import PowerSGD, power_sgd_hook
from lockstep.exchange.saved import SavedExchangeStrategy
from lockstep.group import gather
from lockstep.traffic import through_ring


class PowerSGDStrategy(SavedExchangeStrategy):
    """``strategy.options.hook_options`` are the arguments of `PowerSGD`.

    Checkpoints hold what each rank has left out so far, so they grow by one copy of the weights
    for each rank. With another number of ranks a resumed run begins with exact steps again.
    """

    saved_as = "power_sgd"

    def __init__(
        self,
        *args: Any,
        hook: str = "power_sgd",
        hook_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        try:
            self._state = PowerSGD(**(hook_options or {}))
        except (TypeError, ValueError) as error:
            raise UsageError(
                "strategy.options.hook_options must be arguments of PowerSGD "
                "(matrix_approximation_rank, start_powerSGD_iter >= 2, min_compression_rate, "
                f"orthogonalization_epsilon, random_seed); got {hook_options}: {error}"
            ) from error

    def bytes_per_step(self) -> float:
        """That each link of the ring moves once steps are no longer exact."""
        return through_ring(self._state.payload(list(self._names())), self.world_size)

    @override
    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(self._state, power_sgd_hook)

    @override
    def exchange_state(self) -> dict[str, Any]:
        names = self._names()
        errors = {names[item]: error.cpu() for item, error in self._state.errors.items()}
        factors = {names[item]: factor.cpu() for item, factor in self._state.factors.items()}
        step = self._state.torch_state.iter
        return {"step": step, "errors": gather(errors), "factors": factors}

    @override
    def load_exchange_state(self, state: dict[str, Any]) -> None:
        items = {name: item for item, name in self._names().items()}
        self._state.torch_state.iter = state["step"]
        errors = state["errors"][self.global_rank]
        for store, saved in (
            (self._state.errors, errors),
            (self._state.factors, state["factors"]),
        ):
            store.update(
                {items[name]: value.to(items[name].device) for name, value in saved.items()}
            )

    def _names(self) -> dict[Tensor, str]:
        assert self.lightning_module is not None
        named = self.lightning_module.named_parameters()
        return {item: name for name, item in named if item.requires_grad}
