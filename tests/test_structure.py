"""The shape of the code: who may import whom, and how much there is to read."""

from __future__ import annotations

import ast
import tokenize
from pathlib import Path

import pytest
from conftest import CONF, ROOT

SOURCE = ROOT / "src" / "lockstep"
ROOMS = [
    [
        "errors",
        "secrets",
        "console",
        "help",
        "explain",
        "history",
        "results",
        "plan",
        "rundir",
        "config",
        "preload",
    ],
    [
        "devices",
        "sizes",
        "trust",
        "launchers",
        "placement",
        "signals",
        "epoch_mean",
        "group",
        "traffic",
        "randomness",
        "rendezvous",
        "units",
    ],
    ["schedules", "precision"],
    ["data", "models", "strategies", "loggers", "record", "checkpoints", "slurm"],
    [
        "module",
        "callbacks",
        "forkserver",
        "processes",
        "failures",
        "unpicklable",
        "summary",
        "predictions",
        "resume",
        "features",
        "pictures",
        "trained",
    ],
    ["workloads", "hosts"],
    ["refusals", "exchange", "modelparallel"],
    ["build", "overhead"],
    ["outcome"],
    ["run"],
    ["spawn"],
    ["report"],
    ["launch", "sweep"],
    ["prepare"],
    ["slots"],
    ["search"],
    ["cli"],
    ["parity", "use", "find", "schema", "notebook", "doctor", "slurm_sweep"],
    # only: starter
    ["new"],
    # end only
]
"""A room imports from its own row and the rows above."""
CORE = [
    "config",
    "module",
    "strategies",
    "build",
    "placement",
    "launch",
    "processes",
    "spawn",
    "run",
]
"""What everyone reads, with data/sharding.py and train.py; who starts ranks on several machines is
left to `launchers`."""
BLANK = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)
WITHOUT_TORCH = [
    "secrets",
    "trust",
    "cli",
    "explain",
    "prepare",
    "config",
    "rundir",
    "errors",
    "devices",
    "launchers",
    "placement",
    "sizes",
    "signals",
    "record",
    "results",
    "resume",
    "failures",
    "hosts/agreement",
    "hosts/loss",
    "hosts/meeting",
    "preload",
    "processes",
    "launch",
    "summary",
    "sweep",
    "search/run",
    "search/space",
    "search/study",
    "precision",
    "slots/host",
    "slurm_sweep/collect",
    "slurm_sweep/task",
    "slots/pool",
    "slots/schedule",
    "notebook",
    "modelparallel/mesh",
    "parity/__main__",
    "parity/trial",
    "use/command",
    "use/tasks",
    "find/request",
    "find/lr",
    "find/batch",
    "find/division",
]


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path, top_level: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level else ast.walk(tree)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {node.module, *names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def test_every_room_has_its_place() -> None:
    known = [room for row in ROOMS for room in row]
    assert sorted({room_of(path) for path in FILES}) == sorted(known)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_imports_go_one_way(path: Path) -> None:
    row = {room: i for i, rooms in enumerate(ROOMS) for room in rooms}
    # A function may import later what a process needs only then; the top of a file may not.
    for name in imports(path, top_level=True):
        if name.startswith("lockstep."):
            room = name.split(".")[1]
            if room in row:
                assert row[room] <= row[room_of(path)], f"{path.name} imports {name}"


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_what_answers_before_training_does_not_import_torch(room: str) -> None:
    heavy = {"torch", "lightning", "torchmetrics", "numpy", "wandb"}
    assert not heavy & {name.split(".")[0] for name in imports(SOURCE / f"{room}.py", True)}


def lines_of_code(path: Path) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    tree = ast.parse(path.read_text())
    strings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in BLANK]
    return len({token.start[0] for token in tokens} - strings)


def test_the_core_stays_small() -> None:
    files = [path for path in FILES if room_of(path) in CORE]
    files += [SOURCE / "data" / "sharding.py", ROOT / "train.py"]
    assert sum(map(lines_of_code, files)) < 1400
    optional = (
        "experiment",
        "debug",
        "features",
        "find",
    )  # each is a choice, not a part of every run
    core = [
        path
        for path in CONF.rglob("*.yaml")
        if path.relative_to(CONF).parts[0] not in optional
        and "lockstep.workloads" not in path.read_text()
        and "lockstep.exchange" not in path.read_text()  # a preset, as deletable
        and "lockstep.modelparallel" not in path.read_text()  # as well
    ]
    assert len(core) <= 25


def test_the_entry_stays_under_40_lines() -> None:
    assert len((ROOT / "train.py").read_text().splitlines()) < 40


def test_only_one_file_instantiates_targets() -> None:
    users = [path.name for path in FILES if "hydra.utils" in imports(path)]
    assert users == ["build.py"]
