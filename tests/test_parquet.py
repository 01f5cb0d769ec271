"""Tables in Parquet files: what is given out, converted once, and refused.

That a run from them is the run from memory is in `test_files`, with the other formats.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pytest
import torch
from conftest import ROOT, Launch
from pyarrow import parquet as writer
from test_files import write_table

from lockstep.errors import UsageError
from lockstep.workloads.files import cache, conversion
from lockstep.workloads.files.arrays import Arrays
from lockstep.workloads.files.parquet import parquet

ROWS = 57


def table(rows: int = ROWS) -> dict[str, Any]:
    return {
        "real": numpy.linspace(-1, 1, rows),
        "half": numpy.arange(rows, dtype="float32") / 2,
        "small": numpy.arange(rows, dtype="int16"),
        "large": numpy.arange(rows, dtype="int64") + 2**40,
        "yes": numpy.arange(rows) % 3 == 0,
        "text": [str(row) for row in range(rows)],
    }


def given_out(path: Path | str, *features: str, **options: Any) -> tuple[torch.Tensor, ...]:
    data = parquet(str(path), features, options.pop("target", "yes"), **options).train
    assert isinstance(data, Arrays)
    return data[:]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(write_table(tmp_path / "t.parquet", table()))


def entries(path: Path) -> list[Path]:
    return [item for item in path.with_name("t.parquet.columns").iterdir() if item.is_dir()]


def test_the_command_of_the_page_makes_a_table_of_a_csv_file(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,b,c\n0.5,1,3\n0.25,2,4\n")
    page = (ROOT / "docs/workloads/files.md").read_text()
    (command,) = re.findall(r"^python (-c .*)$", page, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, *shlex.split(command)], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    inputs, target = given_out(tmp_path / "train.parquet", "a", "b", target="c")
    assert inputs.tolist() == [[0.5, 1], [0.25, 2]]
    assert target.tolist() == [3, 4]


def test_columns_are_given_out_as_what_networks_and_losses_take(path: Path) -> None:
    written = table()
    x, y = given_out(path, "small", "real")
    beside = numpy.stack([written["small"], written["real"]], 1)
    assert torch.equal(x, torch.from_numpy(beside.astype("float32")))
    assert torch.equal(y, torch.from_numpy(written["yes"].astype("int64")))
    ids, _ = given_out(path, "large", "small", ids=True)
    assert torch.equal(ids, torch.from_numpy(numpy.stack([written["large"], written["small"]], 1)))
    _, real = given_out(path, "half", target="real")
    assert torch.equal(real, torch.from_numpy(written["real"].astype("float32"))[:, None])
    _, several = given_out(path, "half", target=["yes", "small"])
    assert several.dtype == torch.float32
    assert torch.equal(several[:, 1], torch.from_numpy(written["small"]).float())
    with pytest.raises(UsageError, match=r"Column half must hold whole numbers.*got float32"):
        given_out(path, "small", "half", ids=True)


LISTS = {
    "fixed": pyarrow.list_(pyarrow.float32(), 3),
    "variable": pyarrow.list_(pyarrow.float32()),
    "large": pyarrow.large_list(pyarrow.float32()),
}


@pytest.mark.parametrize("kind", LISTS)
def test_lists_of_one_length_count_as_that_many_columns(
    path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "CHUNK_BYTES", 100)  # a few rows at a time
    vectors = numpy.arange(3 * ROWS, dtype="float32").reshape(ROWS, 3) / 2
    hot = numpy.arange(2 * ROWS, dtype="int8").reshape(ROWS, 2)
    written = table() | {
        "vector": pyarrow.array(vectors.tolist(), LISTS[kind]),
        "hot": pyarrow.array(hot.tolist(), pyarrow.list_(pyarrow.int8())),
    }
    write_table(path, written)
    x, y = given_out(path, "vector")
    assert torch.equal(x, torch.from_numpy(vectors))
    assert torch.equal(y, torch.from_numpy(written["yes"].astype("int64")))
    x, y = given_out(path, "small", "vector", "half", target="hot")
    beside = [written["small"][:, None], vectors, written["half"][:, None]]
    assert torch.equal(x, torch.from_numpy(numpy.hstack(beside).astype("float32")))
    assert y.dtype == torch.float32
    assert torch.equal(y, torch.from_numpy(hot.astype("float32")))
    ids, _ = given_out(path, "hot", "large", ids=True)
    beside = [hot, written["large"][:, None]]
    assert torch.equal(ids, torch.from_numpy(numpy.hstack(beside).astype("int64")))
    assert torch.equal(given_out(path, "vector")[0], torch.from_numpy(vectors)), "as converted"


def test_a_folder_is_its_files_in_order_of_names_whatever_their_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = {name: table()[name] for name in ("half", "small", "yes")}
    (tmp_path / "t").mkdir()
    for name, rows, size in (("b", slice(20, None), 7), ("a", slice(0, 20), 100)):
        part = {key: values[rows] for key, values in written.items()}
        if name == "b":
            part["small"] = part["small"].astype("float64") + 0.25  # other numbers in one file
        write_table(tmp_path / "t" / f"{name}.parquet", part, size)
    monkeypatch.setattr(conversion, "CHUNK_BYTES", 100)  # six rows at a time
    x, y = given_out(tmp_path / "t", "half", "small")
    small = written["small"] + 0.25 * (numpy.arange(ROWS) >= 20)
    assert torch.equal(x, torch.tensor(numpy.stack([written["half"], small], 1)).float())
    assert torch.equal(y, torch.from_numpy(written["yes"].astype("int64")))


def test_columns_are_converted_once_until_the_file_or_the_choice_changes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0
    convert = conversion.convert

    def counted(*arguments: Any) -> None:
        nonlocal count
        count += 1
        convert(*arguments)

    monkeypatch.setattr("lockstep.workloads.files.parquet.convert", counted)
    with ThreadPoolExecutor(4) as ranks:  # each with a lock of its own, as processes have
        several = list(ranks.map(lambda _: given_out(path, "half"), range(4)))
    assert count == 1
    assert all(torch.equal(x, several[0][0]) for x, _ in several)
    given_out(path, "half", nan="allow")
    assert count == 1
    given_out(path, "half", "real")
    assert count == 2
    write_table(path, table() | {"half": table()["half"] + 1})
    x, _ = given_out(path, "half")
    assert count == 3
    assert torch.equal(x, several[0][0] + 1)
    elsewhere = path.with_name("elsewhere")
    given_out(path, "half", cache=str(elsewhere))
    assert count == 4
    assert len(list(elsewhere.glob("*/*.npy"))) == 2


def test_a_conversion_that_was_broken_off_is_never_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = given_out(path, "half")
    (entry,) = entries(path)
    partial = entry.with_name(f"{entry.name}.partial")
    entry.rename(partial)  # as a killed process leaves it: torn, without its name
    file = partial / "features.npy"
    file.write_bytes(file.read_bytes()[:-50])
    (partial / "stray.npy").touch()
    again = given_out(path, "half")
    assert torch.equal(again[0], whole[0])
    assert sorted(item.name for item in entry.iterdir()) == ["features.npy", "target.npy"]
    assert entries(path) == [entry]

    shutil.rmtree(entry)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion, "write_header", full)
    with pytest.raises(UsageError, match=r"columns must be a folder.*No space.*data\.datasets\.c"):
        given_out(path, "half")
    assert entries(path) == []


def test_a_file_that_changes_while_it_is_read_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = conversion.convert

    def slow(parts: list[Path], *rest: Any) -> None:
        convert(parts, *rest)
        os.utime(parts[0], ns=(0, 0))

    monkeypatch.setattr("lockstep.workloads.files.parquet.convert", slow)
    with pytest.raises(UsageError, match=r"t\.parquet must stay as it is while it is read"):
        given_out(path, "half")
    assert entries(path) == []


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def torn_inside(path: Path) -> None:
    values = numpy.random.default_rng(0).random(10_000)
    columns = pyarrow.table({"real": values, "yes": values > 0.5})
    writer.write_table(columns, path, write_page_checksum=True)
    whole = bytearray(path.read_bytes())
    whole[1000:60_000] = bytes(59_000)
    path.write_bytes(whole)


def without_rows(path: Path) -> None:
    write_table(path, {name: values[:0] for name, values in table().items()})


def with_null(path: Path) -> None:
    write_table(
        path, table() | {"real": pyarrow.array([None if i == 23 else i for i in range(57)])}
    )


def with_nan(path: Path) -> None:
    values = table()["real"]
    values[23] = numpy.nan
    write_table(path, table() | {"real": values})


def in_words(path: Path) -> None:
    write_table(path, table() | {"real": table()["text"]})


def in_nested_lists(path: Path) -> None:
    write_table(path, table() | {"real": [[[1.0, 2.0]]] * ROWS})


def in_words_of_lists(path: Path) -> None:
    write_table(path, table() | {"real": [["a", "b"]] * ROWS})


def ragged(path: Path) -> None:
    write_table(path, table() | {"real": [[1.0] * (3 if i == 23 else 2) for i in range(ROWS)]})


def with_null_for_a_list(path: Path) -> None:
    write_table(path, table() | {"real": [None if i == 23 else [1.0] for i in range(ROWS)]})


def with_null_in_a_list(path: Path) -> None:
    lists = [[1.0, None if i == 23 else 2.0] for i in range(ROWS)]
    fixed = pyarrow.array(lists, pyarrow.list_(pyarrow.float32(), 2))
    write_table(path, table() | {"real": fixed})


def with_nan_in_a_list(path: Path) -> None:
    write_table(
        path, table() | {"real": [[1.0, float("nan" if i == 23 else 2)] for i in range(ROWS)]}
    )


def in_empty_lists(path: Path) -> None:
    write_table(path, table() | {"real": pyarrow.array([[]] * ROWS, pyarrow.list_(pyarrow.int8()))})


def longer_in_another_file(path: Path) -> None:
    path.unlink()
    path.mkdir()
    for name, length in (("a", 2), ("b", 3)):
        write_table(path / f"{name}.parquet", table() | {"real": [[1.0] * length] * ROWS})


def lists_in_another_file(path: Path) -> None:
    path.unlink()
    path.mkdir()
    write_table(path / "a.parquet", table() | {"real": [[1.0] * 2] * ROWS})
    write_table(path / "b.parquet", table())


def unsigned(path: Path) -> None:
    write_table(path, table() | {"yes": numpy.arange(ROWS, dtype="uint64")})


def as_csv(path: Path) -> None:
    path.write_text("real,yes\n1,0\n")


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "notes.txt").touch()


FAULTS = {
    torn: r"t\.parquet must be a whole Parquet file; pyarrow says",
    torn_inside: r"t\.parquet must be a whole Parquet file; pyarrow says",
    without_rows: r"t\.parquet must hold at least one row; got 0",
    with_null: r"Column real of .*t\.parquet must have a value in each row; row 23 is null",
    with_nan: r"t\.parquet \(real\) must be finite; row 23 holds NaN",
    in_words: r"Column real of .*t\.parquet must hold floats.*got string",
    in_nested_lists: r"Column real of .*t\.parquet must hold floats.*got list<",
    in_words_of_lists: r"Column real of .*t\.parquet must hold floats.*got list<.*string",
    ragged: "Column real of .*must hold lists of one length; row 23 has 3 numbers, those before 2",
    with_null_for_a_list: "Column real of .* must have a value in each row; row 23 is null",
    with_null_in_a_list: r"at each place of its lists; the list of row 23 has a null",
    with_nan_in_a_list: r"t\.parquet \(real\) must be finite; row 23 holds NaN",
    in_empty_lists: "must hold at least one number in each row; the list of row 0 is empty",
    longer_in_another_file: r"in .*a\.parquet it has a list of 2 in a row, in .*b\.p.* a list of 3",
    lists_in_another_file: r"in .*a\.parquet it has a list of 2 in a row, in .*b\.parquet a number",
    unsigned: r"Column yes must hold whole numbers that int64 holds.*got uint64",
    as_csv: r"t\.parquet must be a whole Parquet file; pyarrow says",
    as_folder: r"t\.parquet must be a Parquet file, or a folder with files \*\.parquet",
    Path.unlink: r"t\.parquet must be a Parquet file, or a folder.*there is none",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_table_that_cannot_be_used_is_named_with_its_fault(
    path: Path, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "CHUNK_BYTES", 100)  # rows are counted over the pieces
    fault(path)
    with pytest.raises(UsageError, match=FAULTS[fault]):
        given_out(path, "real", nan="scan")
    if fault not in (with_nan, with_nan_in_a_list):
        assert not list(path.parent.glob("*.columns/*/")), "nothing is left of it"


def test_names_of_columns_are_checked(path: Path) -> None:
    with pytest.raises(
        UsageError,
        match=r"must name columns of .*t\.parquet, each there once; got other\. There "
        "are: real, half, small, large, yes, text",
    ):
        given_out(path, "real", "other")
    with pytest.raises(UsageError, match="each column once; got yes more than once"):
        given_out(path, "real", "yes")
    with pytest.raises(UsageError, match=r"must list the columns.*got features=\(\), target='yes'"):
        given_out(path)
    with pytest.raises(UsageError, match="nan must be one of allow, refuse, scan; got 'no'"):
        given_out(path, "real", nan="no")


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(path.parent)._replace(free=100)
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda _: usage)
    needed = ROWS * (4 + 8)
    with pytest.raises(UsageError, match=f"columns, {needed} bytes; 100 are free"):
        given_out(path, "half")


def test_only_a_conversion_needs_pyarrow_and_says_its_extra(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = given_out(path, "half")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert torch.equal(given_out(path, "half")[0], before[0])
    install = r"pip install 'lockstep\[parquet\]'"
    with pytest.raises(UsageError, match=f"needs pyarrow: {install}"):
        given_out(path, "real")


def test_another_version_of_the_cache_is_not_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_out(path, "half")
    monkeypatch.setattr(cache, "VERSION", cache.VERSION + 1)
    given_out(path, "half")
    assert len(entries(path)) == 2


@pytest.mark.processes
def test_without_a_path_a_run_says_what_to_give(launch: Launch) -> None:
    with pytest.raises(UsageError, match=r"features must list the columns of the inputs"):
        launch("data=parquet")
    chosen = ("data.datasets.features=[a]", "data.datasets.target=b")
    with pytest.raises(UsageError, match=r"data.datasets.path must name the Parquet file"):
        launch("data=parquet", *chosen)
