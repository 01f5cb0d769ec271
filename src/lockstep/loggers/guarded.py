"""A logger that fails is switched off; the run, whose own files are its record, goes on."""

from __future__ import annotations

import logging
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger

from lockstep.errors import one_line
from lockstep.loggers.csv import CsvLogger

log = logging.getLogger(__name__)

CALLED = (
    "log_hyperparams",
    "log_metrics",
    "log_image",
    "log_picture",
    "log_graph",
    "rewind",
    "save",
    "finalize",
    "after_save_checkpoint",
)
"""What Lightning and this project call on a logger."""


def guarded(loggers: list[Logger]) -> list[Logger]:
    """The same loggers; the first error of one is a warning, and then nothing is sent to it.

    A server goes away, a disk of its own is full: hours of training are worth more than a point in
    a curve. Not `CsvLogger`: where the run's directory cannot be written, the run cannot either.
    """
    for logger in loggers:
        if not isinstance(logger, CsvLogger):
            calls = [Call(logger, name) for name in CALLED if hasattr(type(logger), name)]
            for call in calls:
                vars(logger)[call.name] = call
    return loggers


class Call:
    """In the place of a method of one logger; travels by pickle, as ``ddp_spawn`` needs."""

    def __init__(self, logger: Logger, name: str) -> None:
        self.logger, self.name = logger, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(type(self.logger), self.name)(self.logger, *args, **kwargs)
        except Exception as error:  # a client may raise anything
            failed = type(self.logger).__name__
            switch_off(self.logger)
            log.warning(
                "%s failed in %s and gets nothing more of this run, which goes on; metrics.csv has "
                "it all: %s",
                failed,
                self.name,
                one_line(error),
            )
            return None


def switch_off(logger: Logger) -> None:
    """Make it Lightning's logger that does nothing, also where the Trainer asks for what the client
    would have to answer, such as ``experiment``."""
    vars(logger).clear()
    logger.__class__ = DummyLogger
    vars(logger).update(vars(DummyLogger()))
