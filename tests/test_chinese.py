"""README.zh.md is README.md in Chinese: the same blocks, tables, links and names of things."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT

ENGLISH, CHINESE = ((ROOT / name).read_text() for name in ("README.md", "README.zh.md"))
BACK_AND_FORTH = {"README.md", "README.zh.md"}


def outside_blocks(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def blocks(text: str) -> list[str]:
    return re.findall(r"```\w*\n.*?```", text, flags=re.DOTALL)


def levels(text: str) -> list[str]:
    return re.findall(r"^(#+) ", outside_blocks(text), flags=re.MULTILINE)


def rows(text: str) -> list[tuple[int, str]]:
    """Of each table row, the number of cells and the first, when that is a name in code."""
    found = re.findall(r"^\|(.*)\|$", text, flags=re.MULTILINE)
    cells = [[cell.strip() for cell in row.split("|")] for row in found]
    return [(len(row), row[0] if row[0].startswith("`") else "") for row in cells]


def links(text: str) -> list[str]:
    return sorted(set(re.findall(r"\]\(([^)]+)\)", text)) - BACK_AND_FORTH)


def names(text: str) -> list[str]:
    return sorted(re.findall(r"`([^`\n]+)`", outside_blocks(text)))


def steps(text: str) -> int:
    return len(re.findall(r"^(?:- |\d\. )", outside_blocks(text), flags=re.MULTILINE))


@pytest.mark.parametrize("part", [blocks, levels, rows, links, names, steps])
def test_the_two_readmes_have_the_same(part: object) -> None:
    assert callable(part)
    assert part(CHINESE) == part(ENGLISH)


def test_each_readme_links_to_the_other() -> None:
    assert "](README.zh.md)" in ENGLISH
    assert "](README.md)" in CHINESE


def test_every_paragraph_was_translated() -> None:
    prose = [text for text in outside_blocks(CHINESE).split("\n\n") if len(text.strip()) > 40]
    assert len(prose) >= 15
    assert not [text for text in prose if not re.search(r"[\u4e00-\u9fff]", text)]
