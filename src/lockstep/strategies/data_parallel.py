"""dp: one process, N devices. Replicas compute ``LightningModule.forward``, the root all the rest.

Importing this module makes ``Trainer(strategy="dp", devices=N)`` work. docs/decisions/0002-dp.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lockstep.strategies.replicas import Replicas, current_replica, replicate
from lockstep.strategies.scatter_gather import chunk_sizes, merge, split


class DataParallelStrategy(SingleDeviceStrategy):
    """Computes ``self(x)``, called in a step, in replicas; for all else Lightning sees one device.

    No sampler is injected: the loader yields the global batch; losses, logs and metrics see all of
    it, once. Hooks on the LightningModule see the whole batch, hooks on its children the chunk of
    each replica. What forward sets on ``self`` is kept from replica 0 alone, and so are the running
    statistics of BatchNorm, as with `torch.nn.DataParallel`.
    """

    strategy_name = "dp"

    def __init__(self, parallel_devices: list[torch.device] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.parallel_devices = parallel_devices or []  # the Trainer fills it from ``devices``
        self._replicas: Replicas | None = None  # None on one device: plain Lightning
        self._divided = 0  # calls of forward
        self._checked = False

    @property
    def num_nodes(self) -> int:
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise ValueError(f"dp is one process on one node; got num_nodes={num_nodes}. Use ddp.")

    @property
    @override
    def root_device(self) -> torch.device:
        return self.parallel_devices[0]

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        module, self._checked = self.lightning_module, False
        assert module is not None
        if len(self.parallel_devices) == 1:
            return
        compiled = [name for name, part in module.named_modules() if part._compiled_call_impl]
        if "forward" in vars(module) or compiled:
            raise ValueError(
                "dp copies the LightningModule, and what `compile()` has made calls the original; "
                f"got a compiled {type(module).__name__}.{', '.join(compiled)}. Use compile=false, "
                "self.network = torch.compile(self.network), or ddp."
            )
        self._replicas = Replicas(self.parallel_devices)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._parallel_forward():
            divided, output = self._divided, super().training_step(*args, **kwargs)
        checked, self._checked = self._checked, True
        if self._replicas and self._divided == divided and not checked:
            rank_zero_warn(
                "dp divides what forward computes; training_step did not call it with a tensor, so "
                f"1 of {len(self.parallel_devices)} devices worked. Call self(x) in training_step."
            )
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._parallel_forward():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._parallel_forward():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._parallel_forward():
            return super().predict_step(*args, **kwargs)

    @override
    def teardown(self) -> None:
        if self._replicas:
            self._replicas.close()
        self._replicas = None
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        strategy_registry.register("dp", cls, "replicas of forward in one process", override=True)

    @contextmanager
    def _parallel_forward(self) -> Iterator[None]:
        """Divide calls of ``forward`` of the Trainer's module.

        Its class is patched, not the instance: copies made in a step stay plain modules.
        """
        if self._replicas is None:
            yield
            return
        root = self.lightning_module
        assert root is not None
        cls = type(root)
        own, plain = vars(cls).get("forward"), cls.forward

        @wraps(plain)
        def forward(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
            divide = module is root and current_replica() is None
            return (self._forward if divide else plain)(module, *args, **kwargs)

        setattr(cls, "forward", forward)  # noqa: B010
        try:
            yield
        finally:
            setattr(cls, "forward", own) if own else delattr(cls, "forward")

    def _forward(self, module: LightningModule, *args: Any, **kwargs: Any) -> Any:
        assert self._replicas is not None
        sizes = chunk_sizes({"args": args, "kwargs": kwargs}, len(self.parallel_devices))
        self._divided += bool(sizes)
        devices = self.parallel_devices[: max(1, len(sizes))]
        hook, module._current_fx_name = module._current_fx_name, None  # Lightning refuses self.log
        try:
            chunks = split((args, kwargs), sizes, devices)
            return merge(self._replicas.run(replicate(module, devices), chunks), sizes, devices[0])
        finally:
            module._current_fx_name = hook


DataParallelStrategy.register_strategies(StrategyRegistry)
