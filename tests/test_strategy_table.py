"""Each row of the table in docs/choosing-a-strategy.md is what a run of that strategy does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from conftest import CONF, ROOT, WARNING, Launch
from counting import ranks_agree, traffic

PAGE = ROOT / "docs" / "choosing-a-strategy.md"
HEADINGS = [
    *("strategy", "what is split", "exchanged in a step", "bytes, formula", "N = 2", "N = 4"),
    *("synchronous", "test/loss, N = 2", "where", "choose it"),
]
SPLIT_HEADINGS = [
    *("strategy", "what is split", "exchanged in a step", "bytes, formula", "N = 2"),
    *("synchronous", "test/loss, N = 2", "where", "choose it"),
]
NOT_RUN_HEADINGS = [*HEADINGS[:3], "run by a test", *HEADINGS[-2:]]
STEPS = 16
"""Of an epoch of the default run."""
SHAPES = [(64, 10), (64,), (64, 64), (64,), (1, 64), (1,)]
"""Of the default network's parameters, float32."""
P = 4 * sum(map(math.prod, SHAPES))
Q = 4 * sum(
    2 * sum(shape) if len(shape) == 2 and 4 * sum(shape) < math.prod(shape) else math.prod(shape)
    for shape in SHAPES
)
"""Bytes of PowerSGD's factors of rank 2; what would shrink by less than half stays as it is."""


@dataclass(frozen=True)
class Row:
    """Of the table, a cell each; `formula` is Python."""

    strategy: str
    split: str
    exchanged: str
    formula: str
    two: str
    four: str
    synchronous: str
    loss: str
    where: str
    when: str

    def bytes_of(self, ranks: int) -> int:
        """What the formula yields for the default run."""
        return round(eval(self.formula, {}, {"N": ranks, "P": P, "Q": Q, "k": 8}))


@dataclass(frozen=True)
class SplitRow:
    """Of the table of strategies that split the network."""

    strategy: str
    split: str
    exchanged: str
    formula: str
    two: str
    synchronous: str
    loss: str
    where: str
    when: str

    def bytes_of(self, ranks: int) -> int:
        """``F``: all parameters, padded so that their first dimensions divide by the ranks."""
        padded = [(-(-first // ranks) * ranks, *others) for first, *others in SHAPES]
        sizes = {"B": 128, "h": 64, "o": 1, "F": 4 * sum(map(math.prod, padded))}
        return round(eval(self.formula, {}, {"N": ranks, **sizes}))


def rows() -> list[Row]:
    return [Row(*row) for row in below(HEADINGS)]


def below(headings: list[str]) -> list[list[str]]:
    """The cells of the table with these headings, row by row."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    under = cells[cells.index(headings) + 2 :]
    return list(takewhile(lambda row: len(row) == len(headings), under))


ROWS = rows()
SPLIT = [SplitRow(*row) for row in below(SPLIT_HEADINGS)]
SEVERAL = [row for row in ROWS if not row.where.startswith("one process")]


def test_every_preset_has_a_row() -> None:
    """A new one: add its row, with what `python train.py strategy=NAME compare=true` tells."""
    not_run = [row[0] for row in below(NOT_RUN_HEADINGS)]
    assert sorted([*(row.strategy for row in [*ROWS, *SPLIT]), *not_run]) == sorted(
        path.stem for path in (CONF / "strategy").glob("*.yaml")
    )


def run(
    launch: Launch, row: Row | SplitRow, ranks: int, directory: Path, *more: str
) -> dict[str, Any]:
    """Of four epochs the last one is counted: PowerSGD's first 10 steps are exact."""
    counter = "Traffic" if isinstance(row, Row) else "StepTraffic"
    count = (
        f"+callbacks.traffic={{_target_: counting.{counter}, after_steps: {3 * STEPS}, "
        "directory: '${hydra:runtime.output_dir}'}"
    )
    where = [f"strategy={row.strategy}", f"trainer.devices={ranks}", "trainer.accelerator=cpu"]
    return launch(*where, "compare=true", count, *more, directory=directory)


def on_the_way(directory: Path, ranks: int) -> float:
    """Bytes of an epoch as a profiler has counted them: a ring's link, or what rank 0 moves."""
    first = traffic(directory)[0]
    ring = 2 * (ranks - 1) / ranks * first["all_reduce"]
    return ring + first["send"] + first["receive"]


@pytest.mark.processes
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.strategy)
def test_a_row_is_what_two_processes_do(
    launch: Launch, tmp_path: Path, capfd: pytest.CaptureFixture[str], row: Row
) -> None:
    """The table's loss, and as many bytes as the run tells, the formula yields and gloo moves.

    No rank warns: pytest's filters do not reach other processes.
    """
    ranks = 1 if row.strategy == "auto" else 2
    result = run(launch, row, ranks, tmp_path / "run")
    assert not WARNING.search(capfd.readouterr().err)
    same = row.loss == ROWS[0].loss
    assert result["metrics"]["test/loss"] == pytest.approx(
        float(row.loss), rel=1e-3 if same else 0.05
    )
    if row not in SEVERAL:
        assert result["exchanged_bytes_per_step"] is None
        assert {*traffic(tmp_path / "run")[0].values()} == {0}
        return
    assert result["exchanged_bytes_per_step"] == row.bytes_of(2) == int(row.two.replace(",", ""))
    assert round(on_the_way(tmp_path / "run", 2) / STEPS) == row.bytes_of(2)
    assert (result["exchange_s"] is not None) == (row.synchronous == "yes")
    assert ranks_agree(tmp_path / "run")


@pytest.mark.processes
@pytest.mark.parametrize("row", SPLIT, ids=lambda row: row.strategy)
def test_a_network_in_parts_has_the_loss_and_the_bytes_of_its_row(
    launch: Launch, tmp_path: Path, row: SplitRow
) -> None:
    result = run(launch, row, 2, tmp_path / "run")
    assert row.loss == ROWS[0].loss
    assert result["metrics"]["test/loss"] == pytest.approx(float(row.loss), rel=1e-3)
    assert row.bytes_of(2) == int(row.two.replace(",", ""))
    for moved in traffic(tmp_path / "run"):
        assert through_a_link(moved, 2) == row.bytes_of(2) * STEPS
    assert result["exchanged_bytes_per_step"] is None, "docs/choosing-a-strategy.md says why"


def through_a_link(moved: dict[str, int], ranks: int) -> float:
    """Bytes of an epoch between two ranks: all-reduce and all-gather are rings, of whose all-gather
    the profiler tells a rank's own part; the others go from one rank to the next."""
    ring = (ranks - 1) * (2 / ranks * moved["all_reduce"] + moved["all_gather"])
    return ring + moved["send"] + moved["receive"] + moved["broadcast"]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "ranks"),
    [(row, 3 if row.strategy == "pipeline" else 4) for row in SPLIT],  # of three layers
    ids=lambda item: getattr(item, "strategy", item),
)
def test_a_network_in_more_parts_moves_the_bytes_of_its_row(
    launch: Launch, tmp_path: Path, row: SplitRow, ranks: int
) -> None:
    """On rank 0, which of a pipeline has one cut."""
    run(launch, row, ranks, tmp_path / "run", "test=false")
    assert through_a_link(traffic(tmp_path / "run")[0], ranks) == row.bytes_of(ranks) * STEPS


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("row", SEVERAL, ids=lambda row: row.strategy)
def test_a_row_is_what_four_processes_do(launch: Launch, tmp_path: Path, row: Row) -> None:
    result = run(launch, row, 4, tmp_path / "run", "test=false")
    assert result["exchanged_bytes_per_step"] == row.bytes_of(4) == int(row.four.replace(",", ""))
    assert round(on_the_way(tmp_path / "run", 4) / STEPS) == row.bytes_of(4)
