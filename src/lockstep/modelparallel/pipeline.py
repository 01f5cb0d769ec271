"""``pipeline``: each rank holds some consecutive layers, and micro-batches follow each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lockstep.errors import UsageError
from lockstep.modelparallel.handover import Deliver, Receive, Send
from lockstep.modelparallel.mesh import Mesh
from lockstep.modelparallel.stages import Part, parts_of, stages_of
from lockstep.modelparallel.strategy import SplitStrategy, direct_parameters
from lockstep.modelparallel.whole import whole


class PipelineStrategy(SplitStrategy):
    """All micro-batches forward, then all backward (GPipe, Huang et al. 2019, arXiv:1811.06965).

    Inside autograd (`lockstep.modelparallel.handover`), so that any LightningModule with a
    ``network`` trains as it is: every rank gets the last one's outputs and computes the same loss.
    The schedules of `torch.distributed.pipelining` own the loss and the backward pass, which here
    are Lightning's. Rank r computes 1/N of the time plus the time in which the pipeline fills.
    """

    name = "pipeline"

    def __init__(self, mesh: Mesh, micro_batches: int | None = None, **kwargs: Any) -> None:
        super().__init__(mesh, **kwargs)
        number = 2 * mesh.model if micro_batches is None else micro_batches
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise UsageError(
                "strategy.options.micro_batches must be a whole number, at least 1; got "
                f"{micro_batches!r}. Use for example {2 * mesh.model}."
            )
        self.micro_batches = number

    @override
    def split(self, module: LightningModule) -> None:
        module.to(self.root_device)
        network = getattr(module, "network", None)
        outside = [
            name
            for name, part in module.named_children()
            if part is not network and any(True for _ in part.parameters())
        ]
        if outside := [*direct_parameters(module), *outside]:
            raise UsageError(
                "trainer.strategy=pipeline splits the module's network; weights outside of it "
                f"would be trained by each rank alone: {', '.join(outside)}. Move them into "
                "network, or use trainer.strategy=fsdp."
            )
        stages = stages_of(parts_of(network), self.world_size)
        assert isinstance(network, nn.Module)
        for rank, stage in enumerate(stages):
            if rank != self.global_rank:
                for part in stage:
                    for held in part.modules:
                        held.to("meta")  # keeps the names, not the memory
        pipeline = Pipeline(stages[self.global_rank], self.micro_batches, self.root_device)
        vars(network)["forward"] = pipeline

    @override
    def model_to_device(self) -> None:
        """`split` has done so: what other ranks hold is nowhere here."""

    @override
    def norm(self, gradients: Iterable[Tensor]) -> Tensor:
        own = torch.nn.utils.get_total_norm(list(gradients)).to(self.root_device) ** 2
        dist.all_reduce(own)
        return own.sqrt()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        self._refuse_alone()
        state = self.lightning_module.state_dict()
        names = list(state)
        held = {name: item for name, item in state.items() if not _is_elsewhere(item)}
        merged = self._merged(whole(held, keep=True))
        return self._kept({name: merged[name] for name in names if name in merged})

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._refuse_alone()
        own = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        state = own.state_dict()
        merged = self._merged(whole(state["state"], keep=True))
        return self._kept({**state, "state": dict(sorted(merged.items()))})

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        state, own = checkpoint["state_dict"], self.lightning_module.state_dict()
        if strict and state.keys() != own.keys():
            raise RuntimeError(f"other weights: {', '.join(sorted(state.keys() ^ own.keys()))}")
        held = {name: item for name, item in state.items() if not _is_elsewhere(own.get(name))}
        self.lightning_module.load_state_dict(held, strict=False)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        mine = []
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [item for group in optimizer.param_groups for item in group["params"]]
            numbers = [number for group in state["param_groups"] for number in group["params"]]
            here = {
                number for number, item in zip(numbers, parameters, strict=True) if not item.is_meta
            }
            held = {number: item for number, item in state["state"].items() if number in here}
            mine.append({**state, "state": held})
        ParallelStrategy.load_optimizer_state_dict(self, {**checkpoint, "optimizer_states": mine})

    def _merged(self, own: dict[Any, Any]) -> dict[Any, Any]:
        """What the ranks hold together, on rank zero."""
        bucket: list[Any] | None = [None] * self.world_size if self.is_global_zero else None
        dist.gather_object(own, bucket, dst=0)
        return {key: item for held in bucket or [] for key, item in held.items()}


class Pipeline:
    """One rank's part in the forward pass of a network, for a batch ``(B, ...)``."""

    def __init__(self, stage: list[Part], micro_batches: int, device: torch.device) -> None:
        self.stage, self.micro_batches, self.device = stage, micro_batches, device

    def __call__(self, *inputs: Tensor) -> Tensor:
        if len(inputs) != 1:
            raise UsageError(
                f"trainer.strategy=pipeline takes networks of one input; got {len(inputs)}. "
                "Use trainer.strategy=fsdp."
            )
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        anchor = torch.zeros((), device=self.device, requires_grad=True)
        done = []
        for hidden in inputs[0].chunk(self.micro_batches):
            if rank > 0:
                hidden = Receive.apply(anchor, rank - 1)
            for part in self.stage:
                hidden = part.compute(hidden)
            done.append(Send.apply(hidden, rank + 1) if rank < last else hidden)
        output: Tensor = Deliver.apply(last, *done)
        return output


def _is_elsewhere(item: Any) -> bool:
    return isinstance(item, Tensor) and item.is_meta
