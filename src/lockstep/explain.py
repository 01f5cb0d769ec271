"""An error of Hydra or omegaconf in plain words."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from lockstep.errors import UsageError, causes, did_you_mean
from lockstep.help import conf

WANTED = {
    "to Integer": " Use a whole number, such as 2.",
    "to Float": " Use a number, such as 0.1 or 1e-3.",
    "valid bool": " Use true or false.",
}
"""What omegaconf says of a value that is of another type -> the repair."""


def explain(error: Exception) -> str:
    """The error as rule, value and repair."""
    composing = isinstance(error, HydraException | OmegaConfBaseException)
    for each in causes(error) if composing else ():
        if isinstance(each, UsageError):
            return str(each)  # raised by a resolver of ours
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = sorted({*(error.options or ()), *_files_of(group)})
        if group:
            return (
                f"{group}={name}: there is no conf/{group}/{name}.yaml. "
                f"There are: {', '.join(options)}.{did_you_mean(name, options)}"
            )
    cause = error.__cause__ if isinstance(error, ConfigCompositionException) else error
    if isinstance(cause, ConfigKeyError | ValidationError) or hasattr(cause, "full_key"):
        return _explain_key(error, cause)
    if isinstance(error, OverrideParseException):
        if re.fullmatch(r"[\w.@/+~-]+", error.override):
            return (
                f"{error.override} must be key=value, without blanks around the =; there is no =. "
                f"Use {error.override}=..., or python train.py --help for what can be chosen."
            )
        return f"{error} A value with = , or brackets needs quotes: 'key=\"a=b\"'."
    return str(error)


def _files_of(group: str) -> list[str]:
    """Names in a folder of ``conf/`` and below it; Hydra lists those of top folders only."""
    folder = conf() / group
    return sorted(
        path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")
    )


def _explain_key(error: Exception, cause: Any) -> str:
    key = cause.full_key or str(cause.key)
    if isinstance(cause, ValidationError):
        rule = str(cause.msg or cause).splitlines()[0].removesuffix(".")
        wanted = next((use for kind, use in WANTED.items() if kind in rule), "")
        return f"{key}: {rule}.{wanted}"
    parent = cause.parent_node
    place, _, last = key.rpartition(".")
    if hasattr(parent, "keys") and last not in parent:
        choices = [str(name) for name in parent]
        shown = ", ".join(choices) or "none"
        dataclass_keys = cause.object_type not in (None, dict)
        plus = "" if dataclass_keys else f" A key that is new needs a plus: +{key}=..."
        if any(word.startswith("resume=") for word in sys.argv):
            plus = " A run that goes on keeps its model and data: leave out what does not change."
        elsewhere = [] if place else _paths_to(last, parent)
        meant = f" Did you mean {' or '.join(elsewhere)}?" if elsewhere else ""
        return (
            f"{key}: {place or 'the config'} has no key {last!r}."
            f"{meant or did_you_mean(last, choices)} "
            f"It has: {shown}.{plus}"
        )
    return f"{error} {str(cause).strip().splitlines()[0]}"


def _paths_to(name: str, config: DictConfig) -> list[str]:
    """The keys below the top that are called so: lr is optimizer.lr; if there is none, those that
    end so: epochs is trainer.max_epochs."""

    def below(node: Any, path: str) -> Iterator[str]:
        if isinstance(node, dict):
            for key, value in node.items():
                if path and f"_{key}".endswith(f"_{name}"):
                    yield f"{path}.{key}"
                yield from below(value, f"{path}.{key}" if path else str(key))

    found = below(OmegaConf.to_container(config, resolve=False), "")
    ends = [path for path in found if not path.startswith("hydra.")]
    exact = [path for path in ends if path.endswith(f".{name}")]
    return (exact or (ends if len(name) > 2 else []))[:3]
