"""The two ways in which a run ends badly, and what a person reads then."""

from __future__ import annotations


class UsageError(ValueError):
    """Something a person can mend: the message names the rule, the value and the repair."""


class RunFailed(RuntimeError):
    """A run ended with an error that has been logged; the message is its last line."""
