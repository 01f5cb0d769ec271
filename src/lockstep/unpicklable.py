"""Which attribute of an object is the one that pickle cannot send to another process."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

from lockstep.errors import UsageError


def name_culprit(built: Any, error: Exception) -> None:
    """Raise `UsageError` that names the attribute of ``built`` at fault, if it is found."""
    for name in ("module", "data", "trainer"):
        path = _find_unpicklable(getattr(built, name), name, depth=6)
        if path:
            raise UsageError(
                f"trainer.strategy=ddp_spawn sends everything to new processes by pickle, and "
                f"{path} cannot be pickled ({error}). Use a function or class defined at the top "
                "of a file, open files in setup(), or use trainer.strategy=ddp, which sends "
                "nothing."
            ) from error


def _find_unpicklable(value: Any, path: str, depth: int) -> str | None:
    if _can_pickle(value):
        return None
    if depth:
        for name, child in _children(value):
            found = _find_unpicklable(child, f"{path}{name}", depth - 1)
            if found:
                return found
    return path


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", child) for index, child in enumerate(value))
    else:
        own = getattr(value, "__dict__", {}).items()
        # What a person wrote comes before what torch keeps.
        for key, child in sorted(own, key=lambda item: item[0].startswith("_")):
            yield f".{key}", child


def _can_pickle(value: Any) -> bool:
    try:
        ForkingPickler.dumps(value)
    except Exception:  # pickling runs anybody's __getstate__: whatever it raises is the answer
        return False
    return True
