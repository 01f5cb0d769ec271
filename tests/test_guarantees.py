"""README and docs name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import CONF, ROOT

TESTS = Path(__file__).parent
NAMED = {
    page.relative_to(ROOT).as_posix(): set(
        re.findall(r"`(?:tests/)?(test_\w+(?:\.py)?)`", page.read_text())
    )
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
}
EXISTING = {
    name
    for path in TESTS.glob("test_*.py")
    for name in [path.name, *re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)]
}


def test_every_named_test_exists() -> None:
    assert len(NAMED["docs/guarantees.md"]) > 20
    if not all((CONF / "experiment" / name).is_dir() for name in ("image", "recsys", "text")):
        pytest.skip("an example is left out of this project, and with it the tests that need it")
    own = {"test_mine.py"}  # the reader's, in docs/your-own.md
    for page, names in NAMED.items():
        assert names - own <= EXISTING, page
