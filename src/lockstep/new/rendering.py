"""The starter's files -> a project's: the name in text and paths, and what is left out."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from lockstep.errors import UsageError

NAME = __package__.partition(".")[0]
HOLDER = f"The {NAME.capitalize()} authors"
LONGEST = 16
"""Letters of a name; tests/test_new.py checks that no line gets too long by one of these."""
FIRST_VERSION = "0.1.0"
EXAMPLES = ("image", "recsys", "text")
STARTER_ONLY = (
    "CHANGELOG.md",
    "README.zh.md",
    "docs/chinese.md",
    "docs/decisions/0010-new-projects.md",
    f"src/{NAME}/new/",
    "tests/test_chinese.py",
    "tests/test_new.py",
)
"""Files, and folders, that speak of the starter itself."""
_BEGIN = re.compile(r"^\s*(?:#|<!--) only: (\w+)(?: -->)?$")
_VERSION = re.compile(r'^version = "[^"]*"$', re.MULTILINE)
_END = re.compile(r"^\s*(?:#|<!--) end only(?: -->)?$")


@dataclass(frozen=True)
class File:
    """A file of a commit; ``mode`` is git's, such as 100644."""

    mode: str
    content: bytes


@dataclass(frozen=True)
class Plan:
    """What a project is called, and has."""

    name: str
    holder: str
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_name(self.name)
        unknown = [example for example in self.without if example not in EXAMPLES]
        if unknown:
            raise UsageError(
                f"--without takes examples, of {', '.join(EXAMPLES)}; got {', '.join(unknown)}."
            )
        if not self.holder.strip() or "\n" in self.holder:
            raise UsageError(f"--holder must be a name on one line; got {self.holder!r}.")


def render(files: dict[str, File], plan: Plan) -> dict[str, File]:
    """Path -> file of the project; of ``files`` those that are the starter's only are left out."""
    absent = ("starter", *plan.without)
    dropped = {path for part in absent for path in paths_of(part, files)}
    kept = {path: file for path, file in files.items() if path not in dropped}

    def text(content: str) -> str:
        lines = "".join(_present(content, absent))
        return renamed(lines.replace(HOLDER, plan.holder), plan.name)

    return {renamed(path, plan.name): with_text(file, text) for path, file in kept.items()}


def paths_of(part: str, files: dict[str, File]) -> set[str]:
    """Those that the starter keeps for itself (``starter``), or of an example."""
    if part == "starter":
        return {path for path in files if path.startswith(STARTER_ONLY)}
    places = (
        f"src/{NAME}/workloads/{part}/",
        f"conf/experiment/{part}/",
        f"docs/workloads/{part}.md",
        f"tests/test_{part}",
    )
    names = re.compile(
        rf"{NAME}\.workloads\.{part}\.|^# needs: .*\b{part}\b".encode(), re.MULTILINE
    )
    return {
        path
        for path, file in files.items()
        if path.startswith(places)
        or (path.startswith(("conf/", "tests/")) and names.search(file.content))
    }


def with_text(file: File, change: Callable[[str], str]) -> File:
    """The file with its text changed; a picture stays as it is."""
    try:
        return File(file.mode, change(file.content.decode()).encode())
    except UnicodeDecodeError:
        return file


def mark(line: str) -> str | None:
    """X of a line ``# only: X``, "" of ``# end only``, None of any other."""
    begin = _BEGIN.match(line.rstrip())
    return begin[1] if begin else "" if _END.match(line.rstrip()) else None


def renamed(text: str, name: str) -> str:
    """``lockstep`` and ``Lockstep`` in ``text`` become the name; the version is the project's own,
    which no later one of the starter touches."""
    text = _VERSION.sub(f'version = "{FIRST_VERSION}"', text)
    return text.replace(NAME, name).replace(NAME.capitalize(), name)


def _present(text: str, absent: Iterable[str]) -> Iterator[str]:
    """Without the marks, and what they say is of an absent part."""
    here = True
    for line in text.splitlines(keepends=True):
        part = mark(line)
        if part is not None:
            here = part not in absent
        elif here:
            yield line


def _check_name(name: str) -> None:
    if not _is_usable(name):
        raise UsageError(
            "NAME must be a Python package's: a lower-case letter, then lower-case letters, digits "
            f"and _, {LONGEST} at most, and no package's that is there already; got {name!r}. "
            f"Use NAME={_proposal(name)}."
        )


def _is_usable(name: str) -> bool:
    taken = {NAME, "conf", "src", "tests", "torch", "train", *sys.stdlib_module_names}
    return (
        re.fullmatch(r"[a-z][a-z0-9_]*", name) is not None
        and len(name) <= LONGEST
        and not keyword.iskeyword(name)
        and name not in taken
    )


def _proposal(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_0123456789")[:LONGEST].strip("_")
    return words if _is_usable(words) else "my_project"
