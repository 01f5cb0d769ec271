"""The Makefile's own errors; its targets are what continuous integration runs."""

from __future__ import annotations

import subprocess

import pytest
from conftest import ROOT


def make(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("words", "stray", "repair"),
    [
        (["train", "trainer.strategy=ddp"], "trainer.strategy=ddp", "train|trainer.strategy=ddp"),
        (["+trainer.x=[1, 2]"], "+trainer.x=[1, 2]", "train|+trainer.x=[1, 2]"),
        (["sweep", "ARGS=a=1", "seed=1"], "seed=1", "sweep|a=1 seed=1"),
        (["test-fast", "k=$(x)"], "k=$(x)", "test-fast|k=$(x)"),
    ],
)
def test_an_override_outside_args_is_refused(words: list[str], stray: str, repair: str) -> None:
    done = make(*words)
    target, arguments = repair.split("|")
    assert done.returncode == 2
    assert f"make passes overrides on in ARGS only; got {stray}." in done.stderr
    assert f'Use: make {target} ARGS="{arguments}".' in done.stderr.replace(".  Stop.", ".")


@pytest.mark.parametrize("blank", [" ", "\t"])
def test_overrides_in_args_reach_the_command(blank: str) -> None:
    done = make("train", f"ARGS=trainer.strategy=ddp{blank}trainer.devices=2", "PYTHON=/a python")
    assert done.returncode == 0, done.stderr
    assert f"train.py trainer.strategy=ddp{blank}trainer.devices=2\n" in done.stdout


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
