"""Keys and passwords do not go where a config goes: its dump, ``result.json``, logs, loggers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from lockstep.errors import UsageError

NAME = re.compile(
    r"(^|[._])(api_?key|password|passwd|passphrase|secret(_key)?|private_key|credentials?"
    r"|(access|api|auth|bearer|hf)_token)$",
    re.IGNORECASE,
)
VARIABLE = re.compile(r"(API_?KEY|PASSWORD|SECRET|TOKEN)$")
IN_ADDRESS = re.compile(r"://[^/@\s:]+:[^/@\s]+@")
SHORTEST = 8
"""Characters of a variable's value that cannot be in a config by chance."""


def refuse_secrets(config: dict[str, Any]) -> None:
    """Raises `UsageError` for a value that is a key or a password, without showing it.

    By its name, by a password in an address, or because an environment variable holds it, such as
    WANDB_API_KEY: ``${oc.env:WANDB_API_KEY}`` is resolved before the config is written.
    """
    for key, value in _strings(config):
        if _is_secret(key, value):
            raise UsageError(
                f"{key} must not hold a key or a password: the config is written to the run's "
                "directory and sent to loggers; its value is not shown here. Use an environment "
                "variable that the client reads itself: WANDB_API_KEY, MLFLOW_TRACKING_USERNAME, "
                "MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN."
            )


def refuse_secrets_in_words(words: list[str]) -> None:
    """The same for a command line: Hydra writes a sweep's before any job is looked at."""
    pairs = (word.partition("=") for word in words)
    refuse_secrets({key.lstrip("+~"): value for key, given, value in pairs if given})


def without_secrets(overrides: list[str]) -> list[str]:
    """Command-line overrides whose secret values are ``***``."""
    pairs = [(override, *override.partition("=")[::2]) for override in overrides]
    return [f"{key}=***" if _is_secret(key, value) else text for text, key, value in pairs]


def _is_secret(key: str, value: str) -> bool:
    if value in ("", "null"):
        return False
    held = (word for name, word in os.environ.items() if VARIABLE.search(name))
    return bool(
        NAME.search(key)
        or IN_ADDRESS.search(value)
        or any(word in value for word in held if len(word) >= SHORTEST)
    )


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _strings(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, key)
    elif isinstance(value, str) and value:
        yield key, value
