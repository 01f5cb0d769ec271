"""``ddp`` with a communication hook of torch's, on every backend."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lockstep.exchange.hooks import hook_of
from lockstep.strategies.exact_ddp import ExactDDPStrategy
from lockstep.traffic import gradient_bytes, through_ring


class HookedDDPStrategy(ExactDDPStrategy):
    """``strategy.options.hook`` names what is done to gradients on their way; see `hooks.HOOKS`.

    Every hook yields the mean over ranks, so the weights of unequal shares (`ExactDDPStrategy`)
    count as without one. Lightning registers hooks on CUDA only; torch's work over gloo as well.
    """

    def __init__(
        self,
        *args: Any,
        hook: str | None = None,
        hook_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._hook = hook_of(hook, hook_options or {})

    def bytes_per_step(self) -> float:
        """That each link of the ring moves; the hooks send two bytes a number."""
        assert self.lightning_module is not None
        payload = gradient_bytes(self.lightning_module, 2 if self._hook else None)
        return through_ring(payload, self.world_size)

    @override
    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        if self._hook is not None:
            self.model.register_comm_hook(*self._hook)
