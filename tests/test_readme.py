"""The README's commands are run, and what they print is compared with what it shows."""

from __future__ import annotations

import re
import shlex

import pytest
from conftest import ROOT, Command
from faults import break_at

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [
    line.partition("  #")[0].strip()
    for kind, text in BLOCKS
    if not kind
    for line in text.splitlines()
]
SHOWN = [text for kind, text in BLOCKS if kind == "text"]
TRAIN = [shlex.split(line)[2:] for line in COMMANDS if line.startswith("python train.py")]
NUMBER = r"\d[\d,]*\.?\d*(?:e-?\d+)?"


def comparable(text: str) -> tuple[list[str], list[float]]:
    """The words, and the numbers that are results: no times, speeds or directories."""
    lines = [
        line for line in text.splitlines() if not re.match(r"\s+(time|speed|directory) ", line)
    ]
    kept = "\n".join(lines)
    kept = re.sub(r"^\d\d:\d\d:\d\d", "", kept, flags=re.MULTILINE)
    kept = re.sub(r"(outputs|multirun)/\S+?(?=:? |\n|$)", r"\1", kept)
    kept = re.sub(r"[\d.]+ s\b", "", kept)
    words = re.sub(NUMBER, "N", kept).split()
    return words, [float(number.replace(",", "")) for number in re.findall(NUMBER, kept)]


def assert_shown(printed: str, shown: str) -> None:
    words, numbers = comparable(printed)
    shown_words, shown_numbers = comparable(shown)
    assert words == shown_words
    assert numbers == pytest.approx(shown_numbers, rel=2e-2), (
        "another processor may round otherwise"
    )


def test_a_working_command_stands_in_the_first_25_lines() -> None:
    assert any("make train" in line for line in README.splitlines()[:25])
    assert len(README.splitlines()) < 300


@pytest.mark.processes
def test_the_ddp_command_prints_what_the_readme_shows(train: Command) -> None:
    done = train("trainer.strategy=ddp", "trainer.devices=2")
    assert ["trainer.strategy=ddp", "trainer.devices=2"] in TRAIN
    assert done.returncode == 0
    assert done.stderr == ""
    assert_shown(done.stdout, SHOWN[0])


@pytest.mark.processes
def test_the_sweep_ends_with_what_the_readme_shows(train: Command) -> None:
    command = ["-m", "trainer.strategy=dp,ddp,ddp_spawn", "trainer.devices=1,2"]
    assert command in TRAIN
    done = train(*command)
    assert done.returncode == 0
    assert done.stderr == ""
    assert_shown("\n".join(done.stdout.splitlines()[-7:]), SHOWN[1])


ELSEWHERE = {"-m", "--config-dir", "trainer.strategy=ddp", "resume=latest"}
"""What has a test of its own."""


@pytest.mark.processes
def test_the_resume_command_goes_on_with_a_run_that_was_stopped(train: Command) -> None:
    assert ["resume=latest"] in TRAIN
    stopped = train(break_at(2, 5, "SIGTERM"))
    assert stopped.returncode == 143, stopped.stderr
    done = train("resume=latest")
    assert done.returncode == 0, done.stderr
    (result,) = done.results
    assert (result["status"], result["steps"]) == ("finished", 64)
    assert f"test/loss   {result['metrics']['test/loss']:.6g}" in SHOWN[0], "as if never stopped"
    seconds = re.findall(r"epoch \d/4 .*\((\S+) s\)", done.stdout)
    assert len(seconds) == 2
    assert all(float(epoch) < 60 for epoch in seconds), "of the epoch, not of the machine"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "arguments",
    [line for line in TRAIN if not ELSEWHERE & set(line)],
    ids=lambda arguments: " ".join(arguments) or "default",
)
def test_every_command_of_the_readme_works(train: Command, arguments: list[str]) -> None:
    done = train(*arguments)
    assert done.returncode == 0, done.stderr
    (result,) = done.results
    assert result["status"] == "finished"
