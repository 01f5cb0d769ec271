"""Tables in Parquet files, as `Arrays` of columns that are converted once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from lockstep.data import Splits
from lockstep.errors import UsageError
from lockstep.workloads.files.arrays import Arrays
from lockstep.workloads.files.cache import cached
from lockstep.workloads.files.columns import REFUSE, refuse_unknown
from lockstep.workloads.files.conversion import convert
from lockstep.workloads.files.selection import Selection, select

log = logging.getLogger(__name__)


def parquet(
    path: str | None,
    features: Sequence[str],
    target: str | Sequence[str] | None,
    val: str | None = None,
    test: str | None = None,
    predict: str | None = None,
    ids: bool = False,
    cache: str | None = None,
    nan: str = REFUSE,
) -> Splits:
    """Splits of a Parquet file each, or of a folder of them, which is read in the order of names.

    A batch is ``(features, target)``, of ``predict`` ``(features,)``. Features are floats
    ``(samples, features)``, or int64 with ``ids``. A target of one integer or boolean column is
    int64 ``(samples,)``, as classes are; a list of columns, or one of floats, is floats
    ``(samples, targets)``. A column of lists, all of one length, counts as that many columns.
    ``cache`` is where the converted columns go; None: beside the file, in ``<path>.columns``.

    Raises `UsageError` before training for anything but whole tables of numbers without nulls.
    """
    refuse_unknown(nan)
    selection = select(features, target, ids)
    if not path:
        raise UsageError(
            "data.datasets.path must name the Parquet file, or folder of them, of the training "
            "rows; got none. Use data.datasets.path=train.parquet."
        )
    inputs = replace(selection, target=())
    named = ((path, selection), (val, selection), (test, selection), (predict, inputs))
    train, *others = (_split(name, it, cache, nan) if name else None for name, it in named)
    assert train is not None
    return Splits(train, others[0], others[1], others[2])


def _split(name: str, selection: Selection, cache: str | None, nan: str) -> Arrays:
    source = Path(name).absolute()
    parts = parts_of(source)
    directory = Path(cache).absolute() if cache else source.with_name(f"{source.name}.columns")
    log.info("%s: read from its columns in %s, converted if it has changed", name, directory)
    made = cached(parts, selection, directory, partial(convert, parts, selection))
    shown = selection.columns
    return Arrays(
        [str(made / f"{file}.npy") for file in shown],
        nan,
        names=[f"{name} ({', '.join(columns)})" for columns in shown.values()],
    )


def parts_of(source: Path) -> list[Path]:
    """The file itself, or the files of the folder. Raises `UsageError` where there is none."""
    found = sorted(source.glob("*.parquet")) if source.is_dir() else [source]
    if not found or not all(path.is_file() for path in found):
        raise UsageError(
            f"{source} must be a Parquet file, or a folder with files *.parquet directly in it; "
            "there is none. Look at data.datasets: relative paths are seen from where the command "
            "was started."
        )
    return found
