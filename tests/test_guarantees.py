"""docs/guarantees.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import CONF, ROOT

TESTS = Path(__file__).parent
NAMED = set(re.findall(r"`(test_\w+(?:\.py)?)`", (ROOT / "docs" / "guarantees.md").read_text()))
EXISTING = {
    name
    for path in TESTS.glob("test_*.py")
    for name in [path.name, *re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)]
}


def test_every_named_test_exists() -> None:
    assert len(NAMED) > 20
    if not all((CONF / "experiment" / name).is_dir() for name in ("image", "recsys", "text")):
        pytest.skip("an example is left out of this project, and with it the tests that need it")
    assert NAMED <= EXISTING, sorted(NAMED - EXISTING)
