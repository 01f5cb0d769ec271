"""What fsdp, tensor_parallel and pipeline have in common: exact batches, plain checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lockstep.errors import UsageError
from lockstep.modelparallel.clipping import clip_whole
from lockstep.modelparallel.mesh import Mesh
from lockstep.modelparallel.whole import cut, cut_state, norm, whole
from lockstep.strategies.exact_ddp import weighted


class SplitStrategy(ModelParallelStrategy):
    """Lightning's strategy, with three differences.

    It splits the module itself (`split`), unless the module has a ``configure_model`` of its own.
    It weighs each rank's loss, so that gradients are those of the global batch (`ExactDDPStrategy`
    has why). Its checkpoints are those of one process: plain tensors by the same names, which load
    with ``weights_only=True`` on one device and on any other number of ranks. Lightning's are a
    folder of parts, or name optimizer states another way.
    """

    keeps_parts = True
    """No rank can save alone: each holds a part of the weights."""

    def __init__(self, mesh: Mesh, **kwargs: Any) -> None:
        super().__init__(
            data_parallel_size=mesh.data,
            tensor_parallel_size=mesh.model,
            save_distributed_checkpoint=False,
            **kwargs,
        )
        self.mesh = mesh

    def split(self, module: LightningModule) -> None:
        """Of each subclass: leave of the module what this rank computes, else `UsageError`."""
        raise NotImplementedError

    def norm(self, gradients: Any) -> Tensor:
        """The 2-norm of the gradients of all ranks."""
        return norm(gradients)

    @override
    def setup(self, trainer: Trainer) -> None:
        """As Lightning's, which insists on ``configure_model``. Called for each stage of a run."""
        assert self.accelerator is not None
        module = self.lightning_module
        assert module is not None
        self.accelerator.setup(trainer)
        clip_whole(self.precision_plugin, self.norm)
        self.model = self.precision_plugin.convert_module(module)
        if not getattr(module, "_is_split", False):
            refuse_what_is_shared(trainer, module)
            if not is_overridden("configure_model", module):
                self.split(module)
            self._reduce_metrics_over_data(module)
            vars(module)["_is_split"] = True
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        assert self.lightning_module is not None
        loss = weighted(closure_loss, self.lightning_module.trainer)
        return super().backward(loss, optimizer, *args, **kwargs)

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole on rank zero, empty on the others; all of them call this at once."""
        assert self.lightning_module is not None
        self._refuse_alone()
        return self._kept(whole(self.lightning_module.state_dict(), self.is_global_zero))

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._refuse_alone()
        own = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return self._kept(whole(own.state_dict(), self.is_global_zero))

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        ParallelStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return ParallelStrategy.load_checkpoint(self, checkpoint_path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        held = {name: cut(item, own.get(name)) for name, item in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(held, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        ParallelStrategy.load_optimizer_state_dict(self, checkpoint)
        for optimizer in self.optimizers:
            cut_state(optimizer)

    def _kept(self, state: dict[str, Any]) -> dict[str, Any]:
        return state if self.is_global_zero else {}

    def _refuse_alone(self) -> None:
        assert self.lightning_module is not None
        if self.lightning_module.trainer.interrupted:
            raise RuntimeError(
                "the weights are spread over all ranks, and the run has broken; the newest "
                "checkpoint before it is whole"
            )

    def _reduce_metrics_over_data(self, module: nn.Module) -> None:
        """Ranks that compute the same samples count them once."""
        group = self.device_mesh["data_parallel"].get_group()
        for part in module.modules():
            if isinstance(part, Metric) and self.mesh.model > 1:
                part.process_group = group


def refuse_what_is_shared(trainer: Trainer, module: LightningModule) -> None:
    """State that would have to be the same on all ranks, and would not be."""
    name = f"trainer.strategy={type(trainer.strategy).name}"  # type: ignore[attr-defined]
    norms = [item for item, part in module.named_modules() if isinstance(part, _BatchNorm)]
    if norms:
        raise UsageError(
            f"{name} cannot have BatchNorm, whose running statistics each rank would keep of its "
            f"own samples; got {', '.join(norms[:3])}. Use GroupNorm, or trainer.strategy=ddp."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging):
            raise UsageError(
                f"{name} cannot have {type(callback).__name__}, which copies the whole network "
                "before it is split. Leave it out (features=[]), or use trainer.strategy=ddp."
            )


def direct_parameters(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(recurse=False)]
