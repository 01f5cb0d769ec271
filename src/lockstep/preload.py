"""Import torch and Lightning once, while the garbage collector rests.

They make half a million objects, none of them garbage. Looking through these takes a fifth of the
import, and most of the time in which Python takes itself down; a child that is forked later would
get its own copy of every page that the collector writes to
(https://docs.python.org/3/library/gc.html#gc.freeze).
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module

FOR_TRAINING = ("lockstep.run",)
FOR_RANKS = ("torch.distributed.launcher.api",)
FOR_FORKS = (*FOR_TRAINING, "torch.distributed.elastic.multiprocessing.api", "numpy")
"""All that the fork server's children need."""


def preload(names: tuple[str, ...]) -> None:
    """Import these, and let the collector pass over everything that there is by then."""
    if all(name in sys.modules for name in names):
        return  # or what each job of a sweep leaves would never be collected
    collected = gc.isenabled()
    gc.disable()
    try:
        for name in names:
            import_module(name)
    finally:
        gc.freeze()
        if collected:
            gc.enable()
