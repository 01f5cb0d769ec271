"""A person's own config, shortened, and run on one strategy and device count after the other."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lockstep.config import register
from lockstep.errors import UsageError
from lockstep.launch import launch
from lockstep.prepare import prepare

VARIED = ("trainer.strategy", "trainer.devices", "strategy", "strategy.name")
PRECISION = "trainer.precision=64-true"
"""Unless it is overridden: in float32, 20 steps of Adam can turn rounding into 1e-3 of the largest
weight, as much as a wrong batch may do."""
SETTINGS = [
    "hydra.mode=MULTIRUN",  # each run in fresh processes, as a job of a sweep
    "hydra.job_logging.root.handlers=[file]",
    "trainer.enable_progress_bar=false",
    "launch.max_restarts=0",
    "objective=null",
    "predict=false",
]
WITHOUT_OPTIONS = ("auto", "dp")


class Trial:
    """What ``train.py`` with these overrides would run, but ``steps`` optimizer steps, in ``root``.

    Raises `UsageError` where there is no conf/train.yaml, and for overrides of what is varied.
    """

    def __init__(self, overrides: list[str], steps: int, root: Path) -> None:
        self._config = _shortened(_composed(overrides), steps)
        self._overrides, self._root = overrides, root

    def run(self, name: str, strategy: str, devices: int) -> Path:
        """Train and test there; returns the run's directory. Raises as `launch` does."""
        directory = self._root / f"{name} {devices}".replace(" ", "-")
        directory.mkdir(parents=True)
        config = self._placed(strategy, devices, directory)
        HydraConfig.instance().set_config(config)
        del config["hydra"]
        try:
            with _logged_to(directory / "train.log"):
                launch(prepare(config))
        finally:
            HydraConfig.instance().cfg = None
        return directory

    def _placed(self, strategy: str, devices: int, directory: Path) -> DictConfig:
        config = copy.deepcopy(self._config)
        config.trainer.strategy, config.trainer.devices = strategy, devices
        if strategy in WITHOUT_OPTIONS:
            config.strategy.options = {}
        config.callbacks.parity = {
            "_target_": "lockstep.parity.recording.Recording",
            "directory": str(directory),
        }
        places = [f"trainer.strategy={strategy}", f"trainer.devices={devices}"]
        config.hydra.overrides.task = [*self._overrides, *places]
        config.hydra.runtime.output_dir = str(directory)
        config.hydra.sweep.dir = str(self._root)
        return config


def _composed(overrides: list[str]) -> DictConfig:
    for override in overrides:
        if override.partition("=")[0].lstrip("+~") in VARIED:
            raise UsageError(
                f"Strategies and devices are what is compared; got {override}. "
                "Use --strategies dp,ddp and --devices 1,2."
            )
    folder = Path.cwd() / "conf"
    if not (folder / "train.yaml").is_file():
        raise UsageError(
            f"conf/train.yaml must be in the current directory; there is none in {Path.cwd()}. "
            "Use: cd <the directory of train.py>"
        )
    register()
    with initialize_config_dir(str(folder), version_base="1.3", job_name="train"):
        return compose("train", [PRECISION, *overrides, *SETTINGS], return_hydra_config=True)


def _shortened(config: DictConfig, steps: int) -> DictConfig:
    OmegaConf.set_struct(config, False)
    OmegaConf.set_readonly(config.hydra, False)
    config.hydra.job.num, config.hydra.job.id = 0, "0"
    trainer = config.trainer
    trainer.max_steps = min(steps, trainer.max_steps) if trainer.max_steps >= 0 else steps
    if trainer.limit_train_batches is None:
        # A long epoch ends there too, so that its validation is compared.
        trainer.limit_train_batches = steps * trainer.accumulate_grad_batches
    if config.seed is None:
        config.seed = 0  # one for all runs
    return config


@contextmanager
def _logged_to(path: Path) -> Iterator[None]:
    """Tracebacks of this process go where the run's own lines are, not to the terminal."""
    root, handler = logging.getLogger(), logging.FileHandler(path)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
