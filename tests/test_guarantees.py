"""docs/guarantees.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from conftest import ROOT

TESTS = Path(__file__).parent
NAMED = set(re.findall(r"`(test_\w+(?:\.py)?)`", (ROOT / "docs" / "guarantees.md").read_text()))
EXISTING = {
    name
    for path in TESTS.glob("test_*.py")
    for name in [path.name, *re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)]
}


def test_every_named_test_exists() -> None:
    assert len(NAMED) > 20
    assert NAMED <= EXISTING, sorted(NAMED - EXISTING)
