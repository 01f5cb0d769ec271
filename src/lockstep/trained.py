"""What training left: which checkpoint of a run, and its weights in a module that fits them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep.checkpoints import read_checkpoint
from lockstep.errors import UsageError
from lockstep.resume import newest_checkpoint

SHOWN = 3
"""Keys that a message names; more would hide what to do about them."""


def checkpoint_of(source: Path) -> Path:
    """The file itself; of a run its best checkpoint, or its newest where nothing was monitored."""
    if source.is_file():
        return source
    newest = newest_checkpoint(source) if source.is_dir() else None
    if newest is None:
        raise UsageError(
            f"A checkpoint, or the directory of a run with a good one, is needed; {source} is none."
            " Look for *.ckpt in the run's checkpoints/."
        )
    for name, state in read_checkpoint(newest).get("callbacks", {}).items():
        if name.startswith("ModelCheckpoint") and state.get("best_model_path"):
            best = newest.parent / Path(state["best_model_path"]).name  # a run may have been moved
            return best if best.is_file() else newest
    return newest


def load_module(module: nn.Module, checkpoint: Path) -> None:
    """Put a checkpoint's ``state_dict``, or a file that is one, into the module that it is of;
    else `UsageError`."""
    state = read_checkpoint(checkpoint)
    _load(module, state.get("state_dict", state), checkpoint)


def load_network(network: nn.Module, checkpoint: Path) -> None:
    """The same for a module's ``network`` alone."""
    state = read_checkpoint(checkpoint).get("state_dict", {})
    prefix = "network."
    held = {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}
    _load(network, held, checkpoint)


def _load(module: nn.Module, held: Mapping[str, Any], checkpoint: Path) -> None:
    differ = differences(module.state_dict(), held)
    if differ:
        raise UsageError(
            f"{checkpoint} must hold the weights of this model; {len(differ)} of its keys "
            f"differ, the first are: {'; '.join(differ[:SHOWN])}. Name a checkpoint of the same "
            "model, or leave out overrides of the model."
        )
    module.load_state_dict(held)


def differences(own: Mapping[str, Any], held: Mapping[str, Any]) -> list[str]:
    """A line per key that one side lacks or has in another shape, in the module's order."""
    shapes, other = _shapes(own), _shapes(held)
    return [
        f"{name} is {other.get(name, 'not there')}, of the network {shapes.get(name, 'not there')}"
        for name in [*shapes, *(name for name in other if name not in shapes)]
        if shapes.get(name) != other.get(name)
    ]


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        for name, value in state.items()
    }
