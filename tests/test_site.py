"""The site builds strictly and offline, and no link or anchor in it is dead."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from conftest import ROOT

pytestmark = pytest.mark.processes
LOADS = {"img": "src", "script": "src", "iframe": "src", "source": "src"}
"""What a browser fetches to show a page; of <link>, style sheets, icons and fonts."""
PAGES = sorted(path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md"))


class Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given.get("id", ""), given.get("name", "")}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.loads.append(given["href"])
        if given.get(LOADS.get(tag, ""), ""):
            self.loads.append(given[LOADS[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the command of ``make docs``, without a network as far as Python's own goes."""
    folder = tmp_path_factory.mktemp("site")
    line = re.search(r"-m (sphinx .*)", (ROOT / "Makefile").read_text())
    assert line is not None
    words = line[1].replace("build/", f"{folder}/").split()
    nowhere: dict[str, Any] = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, **nowhere, "PYTHONWARNINGS": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return folder / "docs"


def test_every_page_is_in_the_site_and_its_menu(site: Path) -> None:
    menu = {urlsplit(link).path for link in Page(site / "index.html").links}
    for page in PAGES:
        name = page.with_suffix(".html").as_posix()
        assert (site / name).is_file()
        assert name in menu or name == "index.html"


def test_no_link_or_anchor_is_dead(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    dead, checked = [], 0
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            checked += 1
            known = not anchor or anchor in pages.get(target, page).anchors
            if not target.is_file() or not known:
                dead.append(f"{path.relative_to(site)}: {link}")
    assert not dead
    assert checked > 500


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        for load in Page(path).loads:
            assert not urlsplit(load).netloc, load
            assert (path.parent / urlsplit(load).path).exists(), load
    for style in site.rglob("*.css"):
        fetched = re.findall(r"(?:url\(|@import )['\"]?((?:https?:)?//[^'\")]+)", style.read_text())
        assert not fetched, style


def test_the_search_knows_words_of_the_pages(site: Path) -> None:
    index = (site / "searchindex.js").read_text()
    names = re.search(r'"?docnames"?:\s*(\[[^\]]*\])', index)
    assert names is not None
    assert all(f'"{page.with_suffix("").as_posix()}"' in names[1] for page in PAGES)
    assert "rendezv" in index  # stemmed
    assert index.startswith("Search.setIndex("), "a script: browsers read no other from file://"
