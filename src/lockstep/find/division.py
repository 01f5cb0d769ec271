"""The ways to take the samples of an optimizer step, and the largest of them that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Division:
    """The samples of an optimizer step in ``micro_steps`` global batches of equal size."""

    global_batch_size: int
    micro_steps: int
    per_process: int
    """Of a global batch."""

    @property
    def overrides(self) -> str:
        return (
            f"data.global_batch_size={self.global_batch_size} "
            f"trainer.accumulate_grad_batches={self.micro_steps}"
        )


def divisions(
    samples_per_step: int, world_size: int, samples: int, least: int = 1
) -> list[Division]:
    """Smallest batches first: all that divide each process's share of ``samples_per_step``, from
    ``least`` samples on.

    Of those that hold the whole data set of ``samples`` in one batch only the last one, which has
    the fewest micro-steps.
    """
    share, most = samples_per_step // world_size, -(-samples // world_size)
    sizes = [size for size in range(least, share) if share % size == 0 and size < most]
    return [Division(size * world_size, share // size, size) for size in [*sizes, share]]


def largest(ways: Sequence[Division], fits: Callable[[Division], bool]) -> int | None:
    """The place of the last of ``ways`` that fits; None: the first does not.

    Sizes at least double until one does not fit, so that none is tried that is far too large; what
    is between that and the last that did is halved.
    """
    good, bad = -1, len(ways)
    while good < bad - 1:
        place = (good + bad) // 2 if bad < len(ways) else _doubled(ways, good)
        if fits(ways[place]):
            good = place
        else:
            bad = place
    return good if good >= 0 else None


def _doubled(ways: Sequence[Division], good: int) -> int:
    """The first place whose size is twice that of ``good`` or more; the last, if none is."""
    wanted = 2 * ways[good].per_process if good >= 0 else 0
    places = range(good + 1, len(ways))
    return next((i for i in places if ways[i].per_process >= wanted), len(ways) - 1)
