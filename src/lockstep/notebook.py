"""Runs from a notebook or a Python prompt: ``run("trainer.strategy=dp", "trainer.devices=2")``.

One device and dp are computed in the notebook's own process, so that a class of a cell can be
trained. ddp and ddp_spawn get fresh processes, as everywhere; these cannot see what stands in a
cell, and Lightning starts none from an interactive process itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.config import register
from lockstep.errors import RunFailed, UsageError
from lockstep.explain import explain
from lockstep.launch import launch
from lockstep.placement import STRATEGIES
from lockstep.prepare import prepare
from lockstep.record import Run, record_refusal
from lockstep.results import Result, read_result
from lockstep.rundir import new_run_name
from lockstep.trust import targets


def run(*overrides: str) -> Result:
    """What ``python train.py`` does with these overrides; returns the run's ``result.json``.

    ``conf/`` is that of the current directory or the one above it; the run writes below the
    current directory. Raises `UsageError` for what a person can mend, and
    `lockstep.errors.RunFailed` after the traceback of a run that failed was logged.
    """
    new_run_name()
    try:
        config = _composed(list(overrides))
        directory = Path(config.hydra.run.dir).absolute()
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(explain(error)) from error
    config.hydra.runtime.output_dir = str(directory)
    HydraConfig.instance().set_config(config)
    composed = config.copy()
    del composed["hydra"]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _logging(config.hydra):
            launch(in_notebook(prepare(composed)))
    except (UsageError, RunFailed) as error:
        record_refusal(directory, list(overrides), str(error))
        raise
    finally:
        HydraConfig.instance().cfg = None
    return read_result(directory / "result.json")


def in_notebook(prepared: Run) -> Run:
    """The run with fresh processes where its strategy needs them; raises `UsageError` for a class
    of a cell that they cannot see."""
    strategy = prepared.placement.strategy
    if STRATEGIES[strategy] == "one":
        return prepared
    named = {name for _, name in targets(asdict(prepared.config))}
    cells = sorted(name for name in named if name.startswith("__main__."))
    if cells:
        raise UsageError(
            f"trainer.strategy={strategy} starts processes, which cannot see what is defined in a "
            f"notebook; got {', '.join(cells)}. Write it to a file, as %%writefile does, and "
            "import it from there; or use trainer.strategy=dp, or one device."
        )
    if STRATEGIES[strategy] == "spawn":
        return replace(prepared, placement=replace(prepared.placement, kind="worker"))
    return prepared


def _composed(overrides: list[str]) -> DictConfig:
    folders = [folder / "conf" for folder in (Path.cwd(), Path.cwd().parent)]
    found = [folder for folder in folders if (folder / "train.yaml").is_file()]
    if not found:
        raise UsageError(
            "conf/train.yaml must be in the current directory or the one above; there is none at "
            f"{Path.cwd()}. Use: %cd <the directory of train.py>"
        )
    register()
    with initialize_config_dir(str(found[0]), version_base="1.3", job_name="train"):
        config = compose("train", overrides, return_hydra_config=True)
    OmegaConf.set_struct(config, False)
    OmegaConf.set_readonly(config.hydra, False)
    config.hydra.overrides.task = overrides
    return config


@contextmanager
def _logging(hydra: DictConfig) -> Iterator[None]:
    """The run's own log, in its directory and below the cell; then the notebook's as before."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        configure_log(hydra.job_logging, hydra.verbose)
        yield
    finally:
        for handler in [own for own in root.handlers if own not in handlers]:
            handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)
