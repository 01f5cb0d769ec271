"""Go on with a run: which directory, which checkpoint, which config. Nothing here imports torch."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lockstep.config import Config, as_config
from lockstep.errors import UsageError
from lockstep.results import read_result
from lockstep.rundir import config_file, config_to_resume

log = logging.getLogger(__name__)

MAY_CHANGE = (
    "callbacks",
    "compare",
    "compile",
    "data.eval_batch_size",
    "data.num_workers",
    "init_from",
    "launch",
    "logger",
    "notes",
    "objective",
    "plots",
    "predict",
    "resume",
    "strategy",
    "sweep",
    "test",
    "trainer.accelerator",
    "trainer.benchmark",
    "trainer.default_root_dir",
    "trainer.detect_anomaly",
    "trainer.deterministic",
    "trainer.devices",
    "trainer.enable_checkpointing",
    "trainer.enable_model_summary",
    "trainer.enable_progress_bar",
    "trainer.limit_predict_batches",
    "trainer.limit_test_batches",
    "trainer.limit_val_batches",
    "trainer.log_every_n_steps",
    "trainer.max_epochs",
    "trainer.max_steps",
    "trainer.max_time",
    "trainer.min_epochs",
    "trainer.min_steps",
    "trainer.num_nodes",
    "trainer.profiler",
    "trainer.strategy",
)
"""Keys, with all below them, that do not change what the training so far has computed."""
SPANNING = {"experiment", "debug", "features"}
"""Folders of ``conf/`` whose files set keys all over the config."""


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint of a run that is whole; a torn one is skipped, with a line."""
    found = (directory / "checkpoints").glob("*.ckpt")
    for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        problem = damage(path)
        if problem is None:
            return path
        log.warning("%s is damaged (%s): taking the one before it", path, problem)
    return None


def config_of(source: Path) -> Path:
    """Where the config of a run lies; ``source`` is its directory, or one of its checkpoints."""
    run = source if source.is_dir() else source.resolve().parent.parent
    path = config_file(run)
    if not path.is_file():
        raise UsageError(
            f"A checkpoint must lie in the checkpoints/ of its run, whose settings are in {path}; "
            "there is no such file. Name the run's directory, or a checkpoint in its place."
        )
    return path


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint file; None when its check sums agree."""
    try:
        with zipfile.ZipFile(path) as file:
            bad = file.testzip()
    except (zipfile.BadZipFile, OSError) as error:
        return str(error)
    return f"the check sum of {bad} differs" if bad else None


def resumed_config(composed: DictConfig, overrides: Iterable[str], directory: Path) -> Config:
    """The stored config of the run in ``directory``, with this command's overrides.

    Raises `UsageError` for a directory without a run, a run that has nothing left to do, and an
    override that would make it another run.
    """
    stored = OmegaConf.load(config_to_resume(directory))
    assert isinstance(stored, DictConfig)
    del stored["defaults"]
    before = as_config(stored)
    keys = _keys(overrides)
    if keys & SPANNING:
        after = as_config(composed)
    else:
        for key in sorted(keys):
            # Not merged: another strategy does not keep the options of the one before.
            value = OmegaConf.select(composed, key)
            OmegaConf.update(stored, key, value, merge=False, force_add=True)
        after = as_config(stored)
    after = replace(after, seed=before.seed) if after.seed is None else after
    _refuse_other_run(before, after)
    finished = read_result(directory / "result.json").get("status") == "finished"
    if finished and _length(before) == _length(after):
        raise UsageError(
            f"The run in {directory} is finished. To train it further, add for example "
            f"trainer.max_epochs={2 * (before.trainer.max_epochs or 1)}."
        )
    return after


def _keys(overrides: Iterable[str]) -> set[str]:
    """Where the overrides of a command line point to: ``logger=wandb`` to ``logger``."""
    keys = {item.partition("=")[0].lstrip("+~").partition("@")[0] for item in overrides}
    if "strategy" in keys:
        keys.add("trainer.strategy")
    return {key.replace("/", ".") for key in keys - {"resume", "sweep.resume"}}


def _length(config: Config) -> tuple[Any, ...]:
    trainer = config.trainer
    return trainer.max_epochs, trainer.max_steps, trainer.max_time


def _refuse_other_run(before: Config, after: Config) -> None:
    old, new = dict(flat(asdict(before))), dict(flat(asdict(after)))
    changed = [
        f"{key} ({old.get(key)} -> {new.get(key)})"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not _may_change(key)
    ]
    if changed:
        raise UsageError(
            "A resumed run must stay the run that it was; these overrides would change it: "
            f"{', '.join(changed)}. Leave them out, or start a new run from its weights: "
            "init_from=<checkpoint>."
        )


def _may_change(key: str) -> bool:
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in MAY_CHANGE)


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from flat(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
