"""The Makefile's own errors; its targets are what continuous integration runs."""

from __future__ import annotations

import subprocess

import pytest
from conftest import ROOT


def make(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("stray", ["trainer.strategy=ddp", "seed=1", "+trainer.x=[1, 2]"])
def test_an_override_outside_args_is_refused(stray: str) -> None:
    done = make("train", stray)
    assert done.returncode == 2
    assert "make passes overrides on in ARGS only; got" in done.stderr
    assert 'Use: make train ARGS="' in done.stderr


def test_overrides_in_args_reach_the_command() -> None:
    done = make("train", "ARGS=trainer.strategy=ddp trainer.devices=2", "PYTHON=/a python")
    assert done.returncode == 0, done.stderr
    assert "train.py trainer.strategy=ddp trainer.devices=2\n" in done.stdout


def test_a_python_that_is_not_there_is_said_with_what_to_add() -> None:
    done = subprocess.run(
        ["make", "setup", "PYTHON=no-such-python", "RUN=no/python", "--always-make"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "none of these runs and is one: no-such-python" in done.stderr
    assert "Add to the command: PYTHON=/path/to/python3.12" in done.stderr
