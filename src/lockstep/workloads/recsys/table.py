"""A table of ratings from a CSV file, checked line by line before anything is trained on it."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import UsageError

ROLES = ("user", "item", "rating", "time")
MOVIELENS = {
    "user": "user_id:token",
    "item": "item_id:token",
    "rating": "rating:float",
    "time": "timestamp:float",
}
"""The names of these columns in the file that recbole ships."""


@dataclass(frozen=True)
class Table:
    """R ratings, at most one for each pair of a user and an item, in the file's order."""

    users: NDArray[np.int64]
    """``(R,)``, places in ``user_ids``."""
    items: NDArray[np.int64]
    ratings: NDArray[np.float64]
    times: NDArray[np.float64]
    user_ids: list[str]
    """As they stand in the file, sorted."""
    item_ids: list[str]
    replaced: int
    """Ratings left out because the same user rated the same item again, later."""


def movielens_100k() -> Path:
    """Where the installed package recbole has it; recbole itself is not imported."""
    try:
        files = distribution("recbole").files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "ml-100k.inter":
            return Path(str(file.locate()))
    raise UsageError(
        "MovieLens 100k is read from the package recbole, which is not installed. Use "
        "pip install --no-deps recbole==1.2.1 (docs/workloads/recsys.md says what its licence "
        "allows), or data.datasets.path=<a CSV file with the columns user,item,rating,time>."
    )


def read_table(path: str | None = None, columns: Mapping[str, str] | None = None) -> Table:
    """Read a CSV file with a header, separated by commas or tabs; without a path, MovieLens 100k.

    ``columns`` names the columns of `ROLES` in the file, in any order; others are not looked at.
    Ids are any text; times are numbers, such as seconds since 1970. Of several ratings of one item
    by one user the newest counts: of equal times, that on the later line.

    Raises `UsageError` with the line for what is no rating.
    """
    names = MOVIELENS if path is None else {role: role for role in ROLES} | dict(columns or {})
    if unknown := [role for role in names if role not in ROLES]:
        raise UsageError(f"data.datasets.columns must name {', '.join(ROLES)}; got {unknown}.")
    file = movielens_100k() if path is None else Path(path)
    try:
        return _as_table(list(_ratings(file, names)), file)
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} must be UTF-8 text; {error}. Is it compressed?") from None
    except csv.Error as error:
        raise UsageError(f"{file} must be a CSV file; {error}.") from None
    except OSError as error:
        raise UsageError(
            f"{file} must be a CSV file with the columns {', '.join(names.values())}; "
            f"it cannot be read: {error.strerror}. Look at data.datasets.path."
        ) from None


Rating = tuple[str, str, float, float]


def _ratings(path: Path, names: Mapping[str, str]) -> Iterator[Rating]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        head = file.readline()
        separator = "\t" if "\t" in head else ","
        there = next(csv.reader([head], delimiter=separator), [])
        places = _places(path, there, names)
        lines = csv.reader(file, delimiter=separator, strict=True)
        for fields in lines:
            # One line after another: a quoted field with a line break counts as two.
            yield _rating(f"{path}, line {lines.line_num + 1}", fields, len(there), places)


def _places(path: Path, there: list[str], names: Mapping[str, str]) -> list[int]:
    for role, name in names.items():
        if there.count(name) != 1:
            raise UsageError(
                f"{path} must have one column {name}; there are: {', '.join(there) or 'none'}. "
                f"Use data.datasets.columns.{role}=<its name>."
            )
    return [there.index(names[role]) for role in ROLES]


def _rating(where: str, fields: list[str], width: int, places: list[int]) -> Rating:
    if len(fields) != width:
        raise UsageError(
            f"{where}: a line must have {width} fields, as the header has; got {len(fields)}. "
            "Is the file torn, or a separator within a field not quoted?"
        )
    user, item, rating, time = (fields[place] for place in places)
    if not user or not item:
        raise UsageError(f"{where}: user and item must not be empty; got {user!r} and {item!r}.")
    return user, item, _number(where, "rating", rating), _number(where, "time", time, least=0.0)


def _number(where: str, role: str, text: str, least: float = -math.inf) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < least:
        rule = "a number" if least == -math.inf else "a number, 0 or greater"
        raise UsageError(f"{where}: {role} must be {rule}; got {text!r}. Mend or remove the line.")
    return value


def _as_table(rows: list[Rating], path: Path) -> Table:
    if not rows:
        raise UsageError(f"{path} must hold ratings; there is none below the header.")
    user_ids, users = np.unique([row[0] for row in rows], return_inverse=True)
    item_ids, items = np.unique([row[1] for row in rows], return_inverse=True)
    ratings, times = (np.array([row[place] for row in rows]) for place in (2, 3))
    order = np.lexsort((times, items, users))  # stable: equal times stay in the file's order
    pair = users[order] * len(item_ids) + items[order]
    newest = np.append(pair[1:] != pair[:-1], True)
    kept = np.sort(order[newest])
    return Table(
        users=users[kept].astype(np.int64),
        items=items[kept].astype(np.int64),
        ratings=ratings[kept],
        times=times[kept],
        user_ids=user_ids.tolist(),
        item_ids=item_ids.tolist(),
        replaced=len(rows) - len(kept),
    )
