"""``ddp_spawn``: the objects are built once, pickled, and sent to Lightning's own processes."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch.multiprocessing.spawn import ProcessException

from lockstep.build import Built
from lockstep.failures import raise_cause
from lockstep.processes import context, guarded
from lockstep.record import Run
from lockstep.rendezvous import local_store, meeting_at, of_one_machine
from lockstep.results import Result
from lockstep.run import compute
from lockstep.strategies.spawned import SpawnedEnvironment
from lockstep.unpicklable import name_culprit


def in_spawned(built: Built, run: Run) -> Result:
    """Train and test inside one launch, so that no state is lost on the way back (``best_score``,
    ``global_step``; https://github.com/Lightning-AI/pytorch-lightning/issues/7671)."""
    launcher = built.trainer.strategy.launcher
    assert isinstance(launcher, _MultiProcessingLauncher)
    context()
    store = local_store()
    strategy = built.trainer.strategy
    assert isinstance(strategy, DDPStrategy)
    environment = strategy.cluster_environment
    assert isinstance(environment, SpawnedEnvironment)
    environment.port = store.port
    environ = {**of_one_machine(os.environ), **meeting_at(store)}
    with tempfile.TemporaryDirectory(prefix="lockstep-") as notes:
        try:
            result: Result = launcher.launch(_spawned_rank, built, run, environ, notes)
            return result
        except ProcessException:
            raise_cause(Path(notes), {i: p.exitcode or 0 for i, p in enumerate(launcher.procs)})
            raise
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            name_culprit(built, error)
            raise
        finally:
            _end(launcher, run.config.launch.grace_s)


def _spawned_rank(built: Built, run: Run, environ: dict[str, str], notes: str) -> Result:
    local_rank = os.environ["LOCAL_RANK"]
    os.environ.clear()
    os.environ.update(environ | {"LOCAL_RANK": local_rank})
    built.trainer.strategy._launcher = None  # this is the launched process
    own = own_memory(built)
    return guarded(lambda run: compute(own, run), run, int(local_rank), notes)


def own_memory(built: Built) -> Built:
    """Copy every tensor of the module and the trainer out of shared memory.

    Pickled CPU tensors arrive shared between the processes: weights, buffers and metrics would be
    written to by all ranks at once. Lightning copies weights, for the start method ``spawn`` only.
    Data stays shared: it is only read.
    """
    trainer, module = copy.deepcopy((built.trainer, built.module))
    return replace(built, trainer=trainer, module=module)


def _end(launcher: _MultiProcessingLauncher, grace_s: float) -> None:
    """End the ranks in order, or at once when they take too long or Ctrl-C comes again."""
    until = time.monotonic() + grace_s
    try:
        launcher.kill(signal.SIGTERM)
        for process in launcher.procs:
            process.join(max(0.0, until - time.monotonic()))
    finally:
        for process in launcher.procs:
            if process.is_alive():
                process.kill()
                process.join()
