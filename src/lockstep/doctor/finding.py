"""One line of the doctor's answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    topic: str
    text: str
    repair: str | None = None
    """What to do about it; None where it is good."""

    def line(self) -> str:
        """``good`` or ``bad``, the topic, what was found, and the repair."""
        word = "bad " if self.repair else "good"
        return f"{word}  {self.topic:<12} {self.text}" + (f". {self.repair}" if self.repair else "")
