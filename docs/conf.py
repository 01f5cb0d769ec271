"""The site: ``make docs`` builds it from the pages beside this file; it is built and read offline.

Sphinx, MyST and Furo: https://www.sphinx-doc.org, https://myst-parser.readthedocs.io,
https://pradyunsg.me/furo. Furo uses the reader's own fonts; nothing is fetched from elsewhere.
"""

from pathlib import Path

from sphinx.application import Sphinx

project = "Lockstep"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
highlight_language = "text"  # blocks without a name are commands, some of them with brackets
html_theme = "furo"
html_title = "Lockstep"
html_copy_source = False

ROOT = Path(__file__).parents[1]
FROM_THE_TOP = {
    "index": "README.md",
    "contributing": "CONTRIBUTING.md",
    # only: starter
    "chinese": "README.zh.md",
    # end only
}
"""Page of the site -> the file that GitHub shows; the page's own text comes after it."""


def put_in(_: Sphinx, page: str, source: list[str]) -> None:
    """Take over a file of the project's top folder, with links that hold in this folder."""
    if page in FROM_THE_TOP:
        text = (ROOT / FROM_THE_TOP[page]).read_text(encoding="utf-8").replace("](docs/", "](")
        for name, file in FROM_THE_TOP.items():
            text = text.replace(f"]({file})", f"]({name}.md)")
        source[0] = f"{text}\n{source[0]}"


def setup(app: Sphinx) -> None:
    app.connect("source-read", put_in)
