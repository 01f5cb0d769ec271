"""docs/your-own.md is followed to the letter: its files are written, its commands run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, environment
from test_readme import NUMBER, assert_shown
from test_rooms import copy_without

TEXT = (ROOT / "docs" / "your-own.md").read_text()
FILES = re.findall(r"`((?:src|conf|tests)/[\w/]*mine[\w/]*\.\w+)`.*?```\w+\n(.*?)```", TEXT, re.S)
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, re.S)
COMMANDS = [line for kind, block in BLOCKS if not kind for line in block.splitlines()]
(SHOWN,) = [block for kind, block in BLOCKS if kind == "text"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of this project with the files of the document, and nothing else, added."""
    copy = copy_without([], tmp_path)
    for place, text in FILES:
        (copy / place).parent.mkdir(exist_ok=True)
        (copy / place).write_text(text)
    return copy


def run(project: Path, command: str) -> str:
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    path = {"PYTHONPATH": str(project / "src")}
    done = subprocess.run(
        words, cwd=project, env=environment() | path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stderr == ""
    return done.stdout


def test_the_document_has_four_files_a_test_and_three_commands() -> None:
    assert [place for place, _ in FILES] == [
        "src/mine/data.py",
        "src/mine/network.py",
        "src/mine/objective.py",
        "conf/experiment/mine.yaml",
        "tests/test_mine.py",
    ]
    assert [command.split()[1] for command in COMMANDS] == ["train.py", "train.py", "-m"]


@pytest.mark.processes
def test_its_files_train_under_ddp_to_what_it_shows(project: Path) -> None:
    assert_shown(run(project, COMMANDS[1]), SHOWN)


@pytest.mark.slow
@pytest.mark.processes
def test_its_files_train_on_one_device_to_the_same_and_keep_the_contract(project: Path) -> None:
    alone = run(project, COMMANDS[0])
    for name in ("train/loss", "val/loss", "test/loss", "test/accuracy"):
        pattern = rf"^  {name} +({NUMBER})$"
        (one,), (two,) = (re.findall(pattern, text, re.M) for text in (alone, SHOWN))
        assert float(one) == pytest.approx(float(two), rel=2e-2), name
    assert "7 passed" in run(project, COMMANDS[2])
    run(project, "python -m ruff check src/mine tests/test_mine.py")
