"""What the commands do, as objects that travel into each process of a run. Torch comes there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.record import Run
from lockstep.results import Result
from lockstep.use.command import Request
from lockstep.use.output import output_file

TABLES = {".csv": ("", ()), ".parquet": ("parquet", ("pyarrow",)), ".pt": ("", ())}


@dataclass(frozen=True)
class Evaluate:
    """Exact metrics of the test data; each sample counts once, on any number of processes."""

    source: Path

    @property
    def title(self) -> str:
        return f"testing {self.source.name}"

    def __call__(self, built: Any, run: Run, /) -> Result:
        from lockstep.outcome import plain_metrics
        from lockstep.run import has_test

        if not has_test(built.module, built.data):
            raise UsageError(
                "eval needs a test set, and a module with a test_step; there is none. Return one "
                "in Splits(test=...), or use data=<other data>."
            )
        checkpoint = _load(built.module, self.source)
        built.trainer.test(built.module, datamodule=built.data, verbose=False)
        return {"metrics": plain_metrics(built), "floor": built.floor, "checkpoint": checkpoint}


@dataclass(frozen=True)
class Predict:
    """One row per sample, in the order of the data set."""

    source: Path
    output: Path

    @property
    def title(self) -> str:
        return f"predicting with {self.source.name}"

    def __call__(self, built: Any, run: Run, /) -> Result:
        from lockstep.data import DataModule
        from lockstep.predictions import write_predictions
        from lockstep.use.tables import write_table

        if not isinstance(built.data, DataModule) or not built.data.predict_samples:
            raise UsageError(
                "predict needs a test or predict split from data.datasets; there is none. Return "
                "one in Splits(...), or use data=<other data>."
            )
        checkpoint = _load(built.module, self.source)
        written = write_predictions(built.trainer, built.module, built.data, None, run.directory)
        if built.trainer.is_global_zero:
            write_table(written, self.output)
        built.trainer.strategy.barrier("table")
        return {"metrics": {}, "checkpoint": checkpoint, "output": str(self.output)}


def _load(module: Any, source: Path) -> str:
    from lockstep.trained import checkpoint_of, load_module

    checkpoint = checkpoint_of(source)
    load_module(module, checkpoint)
    return str(checkpoint)


def evaluation(request: Request) -> Evaluate:
    if request.output is not None:
        raise UsageError(f"eval writes result.json in hydra.run.dir; got output={request.output}.")
    return Evaluate(request.checkpoint)


def prediction(request: Request) -> Predict:
    default = request.directory / "predictions.csv"
    return Predict(request.checkpoint, output_file(request.output, default, TABLES))
