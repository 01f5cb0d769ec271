"""Columns of Parquet files -> ``.npy`` files that are mapped; memory does not grow with the rows.

A row group is compressed column by column, so that one row costs the decoding of a whole page of
each column: reading a shuffled order straight from it would decode most of the file for each batch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy
from numpy.lib import format as npy_format

from lockstep.errors import UsageError
from lockstep.workloads.files.selection import Kept, Kinds, Selection

CHUNK_BYTES = 2**22
"""Of rows that are decoded at once."""
BUFFER_BYTES = 2**16
"""Read at once of each column; without it, the reader takes the column of a whole row group."""


def convert(parts: Sequence[Path], selection: Selection, directory: Path) -> None:
    """Write ``features.npy`` and ``target.npy`` of all rows of ``parts``, in their order.

    Raises `UsageError` for what is no table of numbers: see `open_table` and `kinds_of`, for a
    null with its column and row, for tables without rows, and for a disk that is too small.
    """
    tables = [open_table(path) for path in parts]
    rows = sum(table.metadata.num_rows for table in tables)
    if rows == 0:
        raise UsageError(
            f"{parts[0] if len(parts) == 1 else parts[0].parent} must hold at least one row; got 0."
            " Look at what wrote it, and at data.datasets.path."
        )
    columns = (*selection.features, *selection.target)
    kinds = common([kinds_of(t, p, columns) for t, p in zip(tables, parts, strict=True)])
    kept = selection.kept(kinds)
    row_bytes = sum(item.row_bytes for item in kept.values())
    refuse_full(directory, rows * row_bytes)
    with ExitStack() as stack:
        files: dict[str, IO[bytes]] = {}
        for name, item in kept.items():
            files[name] = stack.enter_context((directory / f"{name}.npy").open("wb"))
            write_header(files[name], item, rows)
        for table, path in zip(tables, parts, strict=True):
            for chunk in chunks(table, path, columns, max(1, CHUNK_BYTES // row_bytes)):
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
    """Raises `UsageError` for a column that is missing or holds anything but numbers."""
    from pyarrow import types

    schema, kinds = table.schema_arrow, {}
    for name in columns:
        if schema.names.count(name) != 1:
            raise UsageError(
                "data.datasets.features and data.datasets.target must name columns of "
                f"{path}, each there once; got {name}. There are: {', '.join(schema.names)}."
            )
        kind = schema.field(name).type
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
            raise UsageError(
                f"Column {name} of {path} must hold floats, integers or booleans; got {kind}. "
                "Turn it into a column of numbers first (a category into its number), or leave it "
                "out of data.datasets.features."
            )
        kinds[name] = numpy.dtype(kind.to_pandas_dtype())
    return kinds


def common(kinds: Sequence[Kinds]) -> Kinds:
    """One type for each column that holds what it is in every file."""
    return {name: numpy.result_type(*(item[name] for item in kinds)) for name in kinds[0]}


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


def chunks(
    table: Any, path: Path, columns: Sequence[str], rows: int
) -> Iterator[dict[str, numpy.ndarray[Any, Any]]]:
    """At most ``rows`` rows at a time, each column ``(rows,)``."""
    start = 0
    with readable(path):
        # In this thread alone: the other ranks wait, and a process that has threads forks badly.
        for batch in table.iter_batches(rows, columns=list(columns), use_threads=False):
            chunk = {name: batch.column(name) for name in columns}
            for name, values in chunk.items():
                refuse_nulls(values, f"Column {name} of {path}", start)
            yield {name: values.to_numpy(zero_copy_only=False) for name, values in chunk.items()}
            start += len(batch)


def refuse_nulls(values: Any, where: str, start: int) -> None:
    if values.null_count:
        first = start + numpy.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0]
        raise UsageError(
            f"{where} must have a value in each row; row {first} is null. Fill it or drop that row "
            "before, with a value of your own choice."
        )


def side_by_side(
    chunk: dict[str, numpy.ndarray[Any, Any]], item: Kept
) -> numpy.ndarray[Any, numpy.dtype[numpy.generic]]:
    values = numpy.empty((len(chunk[item.columns[0]]), len(item.columns)), item.dtype)
    for place, name in enumerate(item.columns):
        values[:, place] = chunk[name]
    return values
