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

NETWORKS = {".pt2": ("", ()), ".onnx": ("onnx", ("onnx", "onnxscript", "onnxruntime"))}


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
        from lockstep.predictions import write_predictions
        from lockstep.use.tables import write_table

        _refuse_without_samples(built.data, "predict")
        checkpoint = _load(built.module, self.source)
        written = write_predictions(built.trainer, built.module, built.data, None, run.directory)
        if built.trainer.is_global_zero:
            write_table(written, self.output)
        built.trainer.strategy.barrier("table")
        rows = built.data.predict_samples
        return {"metrics": {}, "rows": rows, "checkpoint": checkpoint, "output": str(self.output)}


@dataclass(frozen=True)
class Export:
    """The network alone as a file, tried on samples before it appears."""

    source: Path
    output: Path

    @property
    def title(self) -> str:
        return f"exporting the network of {self.source.name}"

    def __call__(self, built: Any, run: Run, /) -> Result:
        from lockstep.use.export import export, inputs_of

        if run.placement.world_size * run.placement.device_count > 1:
            raise UsageError(
                f"export is done by one process; got trainer.strategy={run.placement.strategy} "
                f"trainer.devices={run.placement.device_count}. Leave both out."
            )
        _refuse_without_samples(built.data, "export")
        network = getattr(built.module, "network", None)
        if network is None:
            raise UsageError(
                "export needs a module with a `network`, which is what it writes; "
                f"{type(built.module).__name__} has none. Keep it as self.network."
            )
        checkpoint = _load(built.module, self.source)
        inputs = inputs_of(
            network, lambda: built.trainer.predict(built.module, datamodule=built.data)
        )
        difference = export(network, inputs, self.output)
        return {
            "metrics": {"export/difference": difference},
            "checkpoint": checkpoint,
            "output": str(self.output),
            "inputs": {
                name: [str(value.dtype), *value.shape[1:]] for name, value in inputs.items()
            },
        }


def _refuse_without_samples(data: Any, command: str) -> None:
    from lockstep.data import DataModule

    if not isinstance(data, DataModule) or not data.predict_samples:
        raise UsageError(
            f"{command} needs a test or predict split from data.datasets; there is none. Return "
            "one in Splits(...), or use data=<other data>."
        )


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


def exporting(request: Request) -> Export:
    default = request.directory / "network.pt2"
    return Export(request.checkpoint, output_file(request.output, default, NETWORKS))
