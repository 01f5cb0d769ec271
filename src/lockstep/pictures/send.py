"""A picture to the loggers that show pictures, each in its own way."""

from __future__ import annotations

from pathlib import Path

import numpy
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from matplotlib.image import imread

from lockstep.loggers.mlflow import MlflowLogger


def send(logger: Logger, path: Path, step: int) -> None:
    """Under ``pictures/<name>``; `CsvLogger` has the file beside it already."""
    key = f"pictures/{path.stem}"
    if isinstance(logger, TensorBoardLogger):
        pixels = (imread(path)[..., :3] * 255).round().astype(numpy.uint8)
        logger.experiment.add_image(key, pixels, step, dataformats="HWC")
    elif isinstance(logger, WandbLogger):
        logger.log_image(key, [str(path)], step)
    elif isinstance(logger, MlflowLogger):
        logger.log_picture(path)
