"""Keys and passwords do not go where a config goes: its dump, ``result.json``, logs, loggers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from lockstep.errors import UsageError

NAME = re.compile(r"(^|[._])(api_?key|password|passwd|secret|(access|auth|bearer)_token)$", re.I)
VARIABLE = re.compile(r"(API_?KEY|PASSWORD|SECRET|TOKEN)$")
IN_ADDRESS = re.compile(r"://[^/@\s:]+:[^/@\s]+@")
SHORTEST = 8
"""Characters of a variable's value that cannot be in a config by chance."""


def refuse_secrets(config: dict[str, Any]) -> None:
    """Raises `UsageError` for a value that is a key or a password, without showing it.

    By its name, by a password in an address, or because an environment variable holds it, such as
    WANDB_API_KEY: ``${oc.env:WANDB_API_KEY}`` is resolved before the config is written.
    """
    held = {value for name, value in os.environ.items() if VARIABLE.search(name)}
    held = {value for value in held if len(value) >= SHORTEST}
    for key, value in _strings(config):
        if NAME.search(key) or IN_ADDRESS.search(value) or any(word in value for word in held):
            raise UsageError(
                f"{key} must not hold a key or a password: the config is written to the run's "
                "directory and sent to loggers; its value is not shown here. Use an environment "
                "variable that the client reads itself: WANDB_API_KEY, MLFLOW_TRACKING_USERNAME, "
                "MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN."
            )


def without_secrets(overrides: list[str]) -> list[str]:
    """Command-line overrides whose secret values are ``***``."""
    held = {value for name, value in os.environ.items() if VARIABLE.search(name)}
    shown = []
    for override in overrides:
        key, _, value = override.partition("=")
        hidden = bool(NAME.search(key) or IN_ADDRESS.search(value))
        hidden = hidden or any(word in value for word in held if len(word) >= SHORTEST)
        shown.append(f"{key}=***" if hidden else override)
    return shown


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _strings(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, key)
    elif isinstance(value, str) and value:
        yield key, value
