"""How the ranks are laid out: shares of the data times parts of the network. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from lockstep.config import Config
from lockstep.errors import UsageError
from lockstep.placement import Placement


@dataclass(frozen=True)
class Mesh:
    """Rank r has data share ``r // model`` and is number ``r % model`` of those that compute it."""

    data: int
    """Into how many shares a global batch is cut, as under ddp."""
    model: int
    """How many ranks compute one sample together."""


def mesh_of(config: Config, placement: Placement) -> Mesh:
    """Lay out the ranks of a model-parallel run.

    Raises `UsageError` for a size that does not divide them, and for what these strategies lack.
    """
    name, world = placement.strategy, placement.world_size
    if name == "deepspeed":
        _refuse_without_deepspeed(config, placement.accelerator)
        return Mesh(world, 1)
    _refuse_what_is_lacking(config, name)
    if name == "pipeline":
        return Mesh(1, world)
    size = config.strategy.options.get("tensor_parallel_size", None)
    if size is None:
        size = world if name == "tensor_parallel" else 1
    if not isinstance(size, int) or isinstance(size, bool) or size < 1 or world % size:
        works = [str(each) for each in range(1, world + 1) if world % each == 0]
        raise UsageError(
            "strategy.options.tensor_parallel_size must divide the number of processes; got "
            f"{size!r} and {world}. Use {' or '.join(works)}, or another trainer.devices."
        )
    heads = _heads(config)
    if heads is not None and heads % size:
        works = [str(each) for each in range(1, heads + 1) if heads % each == 0]
        raise UsageError(
            "model.network.heads must be divisible by the processes that share them; got "
            f"{heads} heads and {size} processes (trainer.strategy={name}). Use "
            f"model.network.heads={size * -(-heads // size)}, or share over {' or '.join(works)}."
        )
    return Mesh(world // size, size)


def _heads(config: Config) -> int | None:
    network: Any = config.model.get("network")
    heads = network.get("heads") if isinstance(network, dict) else None
    return heads if isinstance(heads, int) else None


def _refuse_what_is_lacking(config: Config, name: str) -> None:
    if config.compile:
        raise UsageError(
            f"compile={config.compile} does not work with trainer.strategy={name}, which splits "
            "the network after it was compiled. Use compile=false, or trainer.strategy=ddp."
        )
    if str(config.trainer.precision) in ("16", "16-mixed", "16-true"):
        raise UsageError(
            f"trainer.precision={config.trainer.precision} needs a gradient scale that ranks agree "
            f"on, which trainer.strategy={name} lacks. Use trainer.precision=bf16-mixed."
        )


def _refuse_without_deepspeed(config: Config, accelerator: str) -> None:
    """Refuse what it needs and is not there, and what would break a promise of this project."""
    name, instead = "trainer.strategy=deepspeed", "or trainer.strategy=fsdp"
    if accelerator != "gpu":
        raise UsageError(
            f"{name} needs GPUs; got trainer.accelerator={accelerator}. Use trainer.strategy=fsdp."
        )
    if find_spec("deepspeed") is None:
        install = "pip install 'lockstep[deepspeed]'"
        raise UsageError(f"{name} needs the package deepspeed: {install}, {instead}.")
    steps = config.trainer.accumulate_grad_batches
    if steps > 1:
        raise UsageError(
            f"{name} counts batches through the end of an epoch, where others step with what they "
            f"have accumulated; got trainer.accumulate_grad_batches={steps}. Use 1, {instead}."
        )
    if config.resume is not None or config.launch.max_restarts:
        raise UsageError(
            f"{name} writes folders as checkpoints, from which no run goes on here; got "
            f"resume={config.resume} launch.max_restarts={config.launch.max_restarts}. Start anew "
            f"with launch.max_restarts=0, {instead}."
        )
