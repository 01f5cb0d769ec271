"""Data in files that are larger than memory: the same samples, order and weights as in memory."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pytest
import torch
from conftest import Launch, quick_and_slow
from faults import break_at
from left import assert_weights_equal, weights
from lightning.pytorch import Trainer
from pyarrow import parquet
from recording import global_batches, indexed, rows
from test_resume import RUN, WHERE, assert_same_run

from lockstep.config import DataConfig
from lockstep.data import DataModule, Splits
from lockstep.data.tensors import Tensors
from lockstep.errors import RunFailed, UsageError
from lockstep.module import SupervisedModule
from lockstep.sizes import BatchSizes
from lockstep.workloads.files.arrays import Arrays, npy

NAMES = ("train", "val", "test")


def columns(samples: int) -> list[dict[str, Any]]:
    """The columns of `recording.indexed` for each split, as float64."""
    splits = indexed(samples, 33, 33)
    parts = []
    for part in (splits.train, splits.val, splits.test):
        assert isinstance(part, Tensors)
        inputs, target = (tensor.double().numpy() for tensor in part.tensors)
        parts.append({"x": inputs, "y": target})
    return parts


def as_npy(directory: Path, samples: int = 67) -> list[str]:
    """Write the splits; returns the overrides that read them."""
    words = ["data=npy", "data.global_batch_size=12"]
    for name, part in zip(NAMES, columns(samples), strict=True):
        paths = [directory / f"{name}_{column}.npy" for column in part]
        for path, values in zip(paths, part.values(), strict=True):
            numpy.save(path, values)
        words.append(f"data.datasets.{name}=[{','.join(map(str, paths))}]")
    return words


def write_table(path: Path, columns: dict[str, Any], row_group_size: int = 10) -> str:
    """Columns as they are given: arrays of NumPy, or of pyarrow where nulls are needed."""
    parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size)
    return str(path)


def as_parquet(directory: Path, samples: int = 67, of_lists: bool = False) -> list[str]:
    """Write the splits, the training rows as a folder of two files; returns the overrides. The ten
    features are a column each, or one of lists."""
    words = ["data=parquet", "data.global_batch_size=12"]
    for key, part in zip(("path", "val", "test"), columns(samples), strict=True):
        table = {f"x{i}": part["x"][:, i] for i in range(10)} | {"y": part["y"][:, 0]}
        if of_lists:
            table = {"x": part["x"].tolist(), "y": part["y"][:, 0]}
        path = directory / f"{key}.parquet"
        if key == "path":
            path.mkdir()
            for name, rows in (("a", slice(0, 40)), ("b", slice(40, None))):
                write_table(path / f"{name}.parquet", {k: v[rows] for k, v in table.items()})
        else:
            write_table(path, table)
        words.append(f"data.datasets.{key}={path}")
    features = "x" if of_lists else ",".join(f"x{i}" for i in range(10))
    return [*words, f"data.datasets.features=[{features}]", "data.datasets.target=y"]


FORMATS = {"npy": as_npy, "parquet": as_parquet}
WITH_LISTS = FORMATS | {"parquet-lists": partial(as_parquet, of_lists=True)}
CASES = [
    (kind, where, workers)
    for kind in FORMATS
    for where, workers in (("auto", 0), ("ddp-2", 2), ("ddp-3", 0), ("spawn-2", 1), ("dp-2", 0))
]
CASES += [("parquet-lists", "auto", 0), ("parquet-lists", "ddp-2", 2)]
QUICK = [(kind, *case) for kind in WITH_LISTS for case in (("ddp-2", 2),)]


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "where", "workers"), quick_and_slow(CASES, QUICK))
def test_a_run_from_files_is_the_run_from_memory(
    launch: Launch, tmp_path: Path, kind: str, where: str, workers: int
) -> None:
    memory = Path(launch(*RUN)["directory"])
    files = WITH_LISTS[kind](tmp_path)
    result = launch(*RUN[2:], *files, *WHERE[where], f"data.num_workers={workers}")
    directory = Path(result["directory"])
    assert_same_run(directory, memory)
    assert result["samples_seen"] == {"train": 67, "val": 33, "test": 33}
    for epoch in range(3):
        seen = [
            index
            for row in rows(directory)
            if row["stage"] == "train" and row["epoch"] == epoch
            for index in row["indices"]
        ]
        if where != "ddp-3":  # 67 samples leave a rank of three with a share of each batch
            assert len(seen) == 67
        assert sorted(set(seen)) == list(range(67))


@pytest.mark.parametrize("kind", FORMATS)
def test_new_rows_are_predicted_without_a_target(launch: Launch, tmp_path: Path, kind: str) -> None:
    words = [*RUN[2:], *FORMATS[kind](tmp_path), "predict=true"]
    expected = torch.load(launch(*words)["predictions"], weights_only=True)
    rows = columns(67)[2]["x"][::-3]
    if kind == "npy":
        numpy.save(tmp_path / "new.npy", rows)
        new = f"[{tmp_path / 'new.npy'}]"
    else:
        new = write_table(tmp_path / "new.parquet", {f"x{i}": rows[:, i] for i in range(10)})
    result = launch(*words, f"data.datasets.predict={new}")
    assert result["samples_seen"]["test"] == 33
    predicted = torch.load(result["predictions"], weights_only=True)
    torch.testing.assert_close(predicted, expected.flip(0)[::3])


class Scaled(torch.nn.Linear):
    """What a signature says of the inputs is not what a batch has."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x) * (1 if scale is None else scale)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize("target", [True, False], ids=["target", "no target"])
def test_samples_to_predict_may_lack_the_target(inputs: int, target: bool) -> None:
    rows, scale, answers = torch.randn(5, 2), torch.rand(5, 1), torch.zeros(5, 1)
    given = (rows, scale)[:inputs]
    module = SupervisedModule(Scaled(2, 1), torch.nn.functional.mse_loss, torch.optim.SGD)
    expected = module.network(*given)
    new: torch.utils.data.Dataset[Any] = Tensors(*given, *([answers] if target else []))
    for predict in [new] if inputs == 2 or target else [new, Rows(rows)]:
        splits = Splits(train=Tensors(*given, answers), predict=predict)
        data = DataModule(splits, DataConfig(), BatchSizes(5, 5, 5, 5), seed=0)
        trainer = Trainer(logger=False, enable_progress_bar=False, enable_model_summary=False)
        (predicted,) = trainer.predict(module, datamodule=data) or []
        torch.testing.assert_close(predicted, expected)


@pytest.mark.processes
@pytest.mark.parametrize("kind", FORMATS)
def test_a_run_from_files_goes_on_in_an_epoch_on_another_device_count(
    launch: Launch, tmp_path: Path, kind: str
) -> None:
    files = [*RUN[2:], *FORMATS[kind](tmp_path)]
    whole = Path(launch(*files)["directory"])
    broken = tmp_path / "broken"
    with pytest.raises(RunFailed):
        launch(*files, *WHERE["ddp-2"], "data.num_workers=1", break_at(1, 2), directory=broken)
    launch(*files, *WHERE["auto"], break_at(1, 2), f"resume={broken}", directory=broken)
    assert_weights_equal(weights(broken), weights(whole))
    done = {place: sorted(set(seen)) for place, seen in global_batches(broken).items()}
    assert done == global_batches(whole)


def test_a_batch_is_the_rows_in_the_order_asked_for_with_types_for_torch(tmp_path: Path) -> None:
    written = {
        "float64": numpy.arange(20.0).reshape(10, 2),
        "int32": numpy.arange(10, dtype="int32"),
        "uint8": numpy.arange(40, dtype="uint8").reshape(10, 1, 2, 2),
        "bool": numpy.arange(10) % 3 == 0,
    }
    for name, values in written.items():
        numpy.save(tmp_path / f"{name}.npy", values)
    data = Arrays([str(tmp_path / f"{name}.npy") for name in written])
    asked = [7, 2, 2, 9, 0]
    batch = data.__getitems__(asked)
    types = [torch.float32, torch.int64, torch.uint8, torch.bool]
    assert [column.dtype for column in batch] == types
    for column, values in zip(batch, written.values(), strict=True):
        assert (column.numpy() == values[asked]).all()
    assert len(data) == 10
    assert torch.equal(data[3][0], torch.tensor([6.0, 7.0]))


def test_other_processes_get_paths_and_not_rows(tmp_path: Path) -> None:
    numpy.save(tmp_path / "x.npy", numpy.zeros((1000, 100)))
    data = Arrays([str(tmp_path / "x.npy")])
    data.__getitems__([1, 2])
    sent = pickle.dumps(data)
    assert len(sent) < 1000
    assert torch.equal(pickle.loads(sent)[5][0], data[5][0])


def faulty(directory: Path, fault: str) -> tuple[list[str], str]:
    """Paths with one fault, and what the error must say."""
    x, y = directory / "x.npy", directory / "y.npy"
    values = numpy.zeros((10, 3))
    numpy.save(x, values)
    numpy.save(y, values)
    if fault == "missing":
        y.unlink()
        return [str(x), str(y)], r"y\.npy must be a \.npy file; there is none"
    if fault == "torn":
        y.write_bytes(y.read_bytes()[:-8])
        return [str(x), str(y)], r"y\.npy must be a whole \.npy file"
    if fault == "torn header":
        y.write_bytes(y.read_bytes()[:20])
        return [str(x), str(y)], r"y\.npy must be a whole \.npy file"
    if fault == "not npy":
        y.write_text("1,2,3\n")
        return [str(x), str(y)], r"y\.npy must be a whole \.npy file"
    if fault == "unequal":
        numpy.save(y, values[:-1])
        return [str(x), str(y)], r"one length; got .*x\.npy: 10, .*y\.npy: 9"
    if fault == "text":
        numpy.save(y, numpy.array(["a"] * 10))
        return [str(x), str(y)], r"y\.npy must hold floats.*got dtype <U1"
    if fault == "objects":
        numpy.save(y, numpy.array([None] * 10), allow_pickle=True)
        return [str(x), str(y)], r"y\.npy must be a whole \.npy file of numbers"
    if fault == "byte order":
        numpy.save(y, values.astype(">f4"))
        return [str(x), str(y)], r"got dtype >f4"
    assert fault == "one number"
    numpy.save(y, numpy.float64(3))
    return [str(x), str(y)], r"y\.npy must hold one array whose first axis"


@pytest.mark.parametrize(
    "fault",
    [
        "missing",
        "torn",
        "torn header",
        "not npy",
        "unequal",
        "text",
        "objects",
        "byte order",
        "one number",
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_fault(tmp_path: Path, fault: str) -> None:
    paths, message = faulty(tmp_path, fault)
    with pytest.raises(UsageError, match=message):
        npy(paths)


def test_nan_is_refused_with_its_row_in_its_batch_or_before_training(tmp_path: Path) -> None:
    values = numpy.zeros((100, 3))
    values[42, 1] = numpy.nan
    path = str(tmp_path / "x.npy")
    numpy.save(path, values)
    data = Arrays([path])
    assert len(data.__getitems__([41, 43])[0]) == 2
    with pytest.raises(UsageError, match=r"x\.npy must be finite; row 42 holds NaN"):
        data.__getitems__([7, 42, 3])
    with pytest.raises(UsageError, match=r"x\.npy must be finite; row 42 holds NaN"):
        Arrays([path], nan="scan")
    assert Arrays([path], nan="allow").__getitems__([42])[0].isnan().sum() == 1
    with pytest.raises(UsageError, match="nan must be one of allow, refuse, scan; got 'no'"):
        Arrays([path], nan="no")


@pytest.mark.processes
def test_without_files_a_run_says_what_to_give(launch: Launch) -> None:
    with pytest.raises(UsageError, match=r"data.datasets.train must name the .npy files"):
        launch("data=npy")
