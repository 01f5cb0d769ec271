"""Columns of Parquet files -> ``.npy`` files that are mapped; memory does not grow with the rows.

A row group is compressed column by column, so that one row costs the decoding of a whole page of
each column: reading a shuffled order straight from it would decode most of the file for each batch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy
from numpy.lib import format as npy_format

from lockstep.errors import UsageError
from lockstep.workloads.files.cells import (
    Numbers,
    is_list,
    is_number,
    lengths_of,
    numbers,
    refuse_nulls,
)
from lockstep.workloads.files.selection import Kept, Kind, Kinds, Selection

CHUNK_BYTES = 2**22
"""Of rows that are decoded at once."""
BUFFER_BYTES = 2**16
"""Read at once of each column; without it, the reader takes the column of a whole row group."""


def convert(parts: Sequence[Path], selection: Selection, directory: Path) -> None:
    """Write ``features.npy`` and ``target.npy`` of all rows of ``parts``, in their order.

    Raises `UsageError` for what is no table of numbers: see `open_table` and `kinds_of`, for a
    null, or a list of another length, with its column and row, for tables without rows, and for a
    disk that is too small.
    """
    tables = [open_table(path) for path in parts]
    rows = sum(table.metadata.num_rows for table in tables)
    if rows == 0:
        raise UsageError(
            f"{parts[0] if len(parts) == 1 else parts[0].parent} must hold at least one row; got 0."
            " Look at what wrote it, and at data.datasets.path."
        )
    columns = (*selection.features, *selection.target)
    with_rows = [(t, p) for t, p in zip(tables, parts, strict=True) if t.metadata.num_rows]
    kinds = common({path: kinds_of(table, path, columns) for table, path in with_rows})
    kept = selection.kept(kinds)
    row_bytes = sum(item.row_bytes for item in kept.values())
    refuse_full(directory, rows * row_bytes)
    with ExitStack() as stack:
        files: dict[str, IO[bytes]] = {}
        for name, item in kept.items():
            files[name] = stack.enter_context((directory / f"{name}.npy").open("wb"))
            write_header(files[name], item, rows)
        for table, path in with_rows:
            for chunk in chunks(table, path, kinds, max(1, CHUNK_BYTES // row_bytes)):
                for name, item in kept.items():
                    files[name].write(side_by_side(chunk, item).tobytes())


def open_table(path: Path) -> Any:
    """A reader of ``path``. Raises `UsageError` without pyarrow, and for another kind of file."""
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as missing:
        raise UsageError(
            f"data=parquet needs {missing.name}: pip install 'lockstep[parquet]'"
        ) from missing
    with readable(path):
        return parquet.ParquetFile(
            path, buffer_size=BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
        )


@contextmanager
def readable(path: Path) -> Iterator[None]:
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError) as error:
        raise UsageError(
            f"{path} must be a whole Parquet file; pyarrow says: {error} Write it again."
        ) from error


def kinds_of(table: Any, path: Path, columns: Sequence[str]) -> Kinds:
    """Raises `UsageError` for a column that is missing or holds anything but numbers or lists of
    them; how long the lists are is what the first row says."""
    schema, kinds = table.schema_arrow, {}
    for name in columns:
        if schema.names.count(name) != 1:
            raise UsageError(
                "data.datasets.features and data.datasets.target must name columns of "
                f"{path}, each there once; got {name}. There are: {', '.join(schema.names)}."
            )
        kind = schema.field(name).type
        of_lists = is_list(kind)
        inner = kind.value_type if of_lists else kind
        if not is_number(inner):
            raise UsageError(
                f"Column {name} of {path} must hold floats, integers or booleans, or lists of "
                f"them; got {kind}. Turn it into a column of numbers first (a category into its "
                "number), or leave it out of data.datasets.features."
            )
        width = first_length(table, path, name) if of_lists else None
        kinds[name] = Kind(numpy.dtype(inner.to_pandas_dtype()), width)
    return kinds


def first_length(table: Any, path: Path, name: str) -> int:
    """Of the list in the first row."""
    with readable(path):
        first = next(table.iter_batches(1, columns=[name], use_threads=False)).column(name)
    refuse_nulls(first, f"Column {name} of {path}", 0)
    if not (length := int(lengths_of(first)[0])):
        raise UsageError(
            f"Column {name} of {path} must hold at least one number in each row; the list of row 0 "
            "is empty. Drop that row before, or leave the column out."
        )
    return length


def common(of_files: Mapping[Path, Kinds]) -> Kinds:
    """One type for each column that holds what it is in every file. Raises `UsageError` where a
    file has longer lists than another, or numbers where another has lists."""
    first, *_ = of_files
    for path, kinds in of_files.items():
        for name, kind in kinds.items():
            if kind.width != of_files[first][name].width:
                raise UsageError(
                    f"Column {name} must hold the same in each file; in {first} it has "
                    f"{_shown(of_files[first][name])} in a row, in {path} {_shown(kind)}. Pad or "
                    "cut its lists to one length before, or leave it out."
                )
    return {
        name: Kind(
            numpy.result_type(*(kinds[name].dtype for kinds in of_files.values())), kind.width
        )
        for name, kind in of_files[first].items()
    }


def _shown(kind: Kind) -> str:
    return "a number" if kind.width is None else f"a list of {kind.width}"


def refuse_full(directory: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed_bytes > free:
        raise UsageError(
            f"{directory.parent} must have room for the converted columns, {needed_bytes:,} bytes; "
            f"{free:,} are free. Make room, or use data.datasets.cache=<a directory with room>."
        )


def write_header(file: IO[bytes], item: Kept, rows: int) -> None:
    header = {
        "descr": npy_format.dtype_to_descr(item.dtype),
        "fortran_order": False,
        "shape": item.shape(rows),
    }
    npy_format.write_array_header_1_0(file, header)


def chunks(table: Any, path: Path, kinds: Kinds, rows: int) -> Iterator[dict[str, Numbers]]:
    """At most ``rows`` rows at a time, each column ``(rows,)``, or ``(rows, width)`` of lists."""
    start = 0
    with readable(path):
        # In this thread alone: the other ranks wait, and a process that has threads forks badly.
        for batch in table.iter_batches(rows, columns=list(kinds), use_threads=False):
            yield {
                name: numbers(batch.column(name), kind.width, f"Column {name} of {path}", start)
                for name, kind in kinds.items()
            }
            start += len(batch)


def side_by_side(chunk: dict[str, Numbers], item: Kept) -> Numbers:
    columns = [chunk[name].reshape(len(chunk[name]), -1) for name in item.columns]
    return numpy.concatenate(columns, axis=1, dtype=item.dtype)
