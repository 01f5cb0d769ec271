"""``fsdp`` and ``tensor_parallel``: parameters as DTensors over a mesh of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from typing_extensions import override

from lockstep.errors import UsageError
from lockstep.modelparallel.mesh import Mesh
from lockstep.modelparallel.strategy import SplitStrategy, direct_parameters
from lockstep.modelparallel.tensor import split_layers
from lockstep.units import parts_with_weights, units_of


class ShardedStrategy(SplitStrategy):
    """FSDP2 over the shares of the data, tensor parallelism over those who share a sample.

    Each rank of ``mesh.data`` keeps 1/N of every parameter, its gradient and its optimizer state. A
    unit's parameters are gathered before its forward and its backward and dropped after; gradients
    are averaged and scattered (Rajbhandari et al. 2020, arXiv:1910.02054, stage 3;
    `torch.distributed.fsdp.fully_shard`). Units are the modules that ``units`` names, with ``*``;
    None: the items of each ModuleList, or the network's children that have weights.

    ``plan`` says how layers are split among the ranks that share a sample; see
    `lockstep.modelparallel.tensor`.
    """

    name = "fsdp"

    def __init__(
        self,
        mesh: Mesh,
        units: list[str] | None = None,
        plan: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(mesh, **kwargs)
        self.units, self.plan = units, plan

    @override
    def split(self, module: LightningModule) -> None:
        if self.mesh.model > 1:
            split_layers(module, self.plan, self.device_mesh["tensor_parallel"])
        if self.mesh.data > 1:
            shard(module, self.units, self.device_mesh["data_parallel"])


class TensorParallelStrategy(ShardedStrategy):
    name = "tensor_parallel"


def shard(module: LightningModule, units: list[str] | None, mesh: DeviceMesh) -> None:
    """Shard each unit, then what is left of each child, whose forward the module calls."""
    if direct := direct_parameters(module):
        raise UsageError(
            "Parameters must be in a part that has a forward, where fsdp gathers them; "
            f"{', '.join(direct)} of {type(module).__name__} are not. Put them into an nn.Module "
            "that is called, or use trainer.strategy=ddp."
        )
    called = [
        name
        for name in parts_with_weights(module)
        if not isinstance(module.get_submodule(name), nn.ModuleList)
    ]
    for name in dict.fromkeys([*named_units(module, units), *called]):
        # The root as well: what it gathers is dropped after its forward, so that between steps a
        # rank holds its own part and nothing else.
        fully_shard(module.get_submodule(name), mesh=mesh, reshard_after_forward=True)


def named_units(module: nn.Module, patterns: list[str] | None) -> list[str]:
    """Names of the modules that are gathered one at a time, inner ones first."""
    if patterns is None:
        return units_of(module)
    names = [name for name, _ in module.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            raise UsageError(
                f"strategy.options.units must name modules; none is like {pattern}. "
                f"There are: {', '.join(names)}."
            )
    found = [name for name in names if any(fnmatch(name, each) for each in patterns)]
    return sorted(found, key=lambda name: -name.count("."))
