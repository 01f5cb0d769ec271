"""When the pictures of a run are drawn: after training, and again when it was tested."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lockstep.data import train_split
from lockstep.errors import UsageError, one_line
from lockstep.history import read_history
from lockstep.loggers.csv import CsvLogger
from lockstep.pictures.samples import Samples
from lockstep.pictures.send import send

log = logging.getLogger(__name__)


class Pictures(Callback):
    """``curves.png``, ``confusion.png``, ``samples.png`` in the run's directory, by rank zero.

    The confusion matrix is the metric of that name, reduced over all ranks; samples are the first
    of the test split in its order. What a run has nothing for is left out, with a line. Raises
    `UsageError` where matplotlib is not installed.
    """

    def __init__(self, directory: Path) -> None:
        if find_spec("matplotlib") is None:
            raise UsageError("plots=true needs matplotlib: pip install 'lockstep[plots]'")
        self.directory = directory
        self._samples: Samples | None = None

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer, pl_module, {})

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._samples = Samples(trainer, pl_module)

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._samples is not None
        self._samples.close()
        columns = self._samples.collect()
        if not self._samples.usable and trainer.is_global_zero:
            log.info(
                "no samples.png: it needs a test split of lockstep.data.Splits, a module "
                "with predict_and_loss"
            )
        self._samples = None
        self._draw(trainer, pl_module, columns)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self._samples is not None:
            self._samples.close()

    def _draw(self, trainer: Trainer, module: LightningModule, columns: dict[str, Tensor]) -> None:
        if not trainer.is_global_zero:
            return
        try:
            paths = self._write(trainer, module, columns)
            for logger in trainer.loggers:
                for path in paths:
                    send(logger, path, trainer.global_step)
        except Exception as error:  # a picture is not worth a trained run, which goes on
            log.warning("no pictures: %s", one_line(error), exc_info=True)
            return
        log.info("pictures: %s", ", ".join(str(path) for path in paths) or "none")

    def _write(
        self, trainer: Trainer, module: LightningModule, columns: dict[str, Tensor]
    ) -> list[Path]:
        from lockstep.pictures import draw

        classes, figures = classes_of(trainer), {}
        history = history_of(trainer)
        if history:
            figures["curves"] = draw.learning_curves(history)
        tables: dict[str, Any] = getattr(module, "tables", {})
        part = next((p for p in ("test", "val") if f"{p}/confusion" in tables), None)
        if part is not None:
            counts = tables[f"{part}/confusion"]
            names = classes or [str(index) for index in range(len(counts))]
            figures["confusion"] = draw.confusion(counts, names, part)
        if "images" in columns:
            highest = int(max(columns["target"].max(), columns["predicted"].max()))
            names = classes or [str(index) for index in range(highest + 1)]
            figures["samples"] = draw.images(columns, names)
        elif "tokens" in columns:
            figures["samples"] = draw.texts(columns)
        elif "rank" in columns:
            figures["samples"] = draw.ranks(columns, classes)
        elif "predicted" in columns:
            figures["samples"] = draw.numbers(columns["predicted"], columns["target"])
        paths = {name: self.directory / f"{name}.png" for name in figures}
        for name, figure in figures.items():
            figure.savefig(paths[name], dpi=110, metadata={"Software": None})
        return list(paths.values())


def history_of(trainer: Trainer) -> dict[str, list[tuple[int, float]]]:
    """Metric -> (step, value) pairs, from ``metrics.csv``, which also has what came before a
    resume; empty without a `CsvLogger`."""
    for logger in trainer.loggers:
        if isinstance(logger, CsvLogger):
            logger.flush()
            return {
                name: [(step, value) for step, _, value in points]
                for name, points in read_history(logger.path).items()
                if "/" in name
            }
    return {}


def classes_of(trainer: Trainer) -> Sequence[str]:
    """The names of the classes, where the training data has ``classes``; else empty."""
    return [str(name) for name in getattr(train_split(trainer), "classes", None) or []]
