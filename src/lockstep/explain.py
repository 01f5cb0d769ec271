"""An error of Hydra or omegaconf in plain words."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from typing import Any

from hydra.errors import (
    ConfigCompositionException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import ConfigKeyError, ValidationError

from lockstep.errors import UsageError
from lockstep.help import conf


def explain(error: Exception) -> str:
    """The error as rule, value and repair."""
    if isinstance(error.__cause__, UsageError):
        return str(error.__cause__)  # raised by a resolver of ours
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = list(error.options or _files_of(group))
        if group:
            return (
                f"{group}={name}: there is no conf/{group}/{name}.yaml. "
                f"There are: {', '.join(options)}.{_nearest(name, options)}"
            )
    cause = error.__cause__ if isinstance(error, ConfigCompositionException) else error
    if isinstance(cause, ConfigKeyError | ValidationError) or hasattr(cause, "full_key"):
        return _explain_key(error, cause)
    if isinstance(error, OverrideParseException):
        return f"{error} A value with = , or brackets needs quotes: 'key=\"a=b\"'."
    return str(error)


def _files_of(group: str) -> list[str]:
    """Names in a folder of ``conf/``; Hydra lists them for top folders only."""
    folder = conf() / group
    return sorted(
        path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")
    )


def _explain_key(error: Exception, cause: Any) -> str:
    key = cause.full_key or str(cause.key)
    if isinstance(cause, ValidationError):
        return f"{key}: {cause.msg.splitlines()[0] if cause.msg else cause}."
    parent = cause.parent_node
    if hasattr(parent, "keys") and key.rpartition(".")[2] not in parent:
        choices = [str(name) for name in parent]
        place = key.rpartition(".")[0] or "the config"
        last = key.rpartition(".")[2]
        shown = ", ".join(choices) or "none"
        dataclass_keys = cause.object_type not in (None, dict)
        plus = "" if dataclass_keys else f" A key that is new needs a plus: +{key}=..."
        if any(word.startswith("resume=") for word in sys.argv):
            plus = " A run that goes on keeps its model and data: leave out what does not change."
        return (
            f"{key}: {place} has no key {last!r}.{_nearest(last, choices)} It has: {shown}.{plus}"
        )
    return f"{error} {_first_line(cause)}"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _nearest(name: str, choices: list[str]) -> str:
    near = get_close_matches(name, choices, n=1, cutoff=0.5)
    return f" Did you mean {near[0]}?" if near else ""
