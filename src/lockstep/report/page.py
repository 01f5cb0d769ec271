"""One page that needs nothing but itself: no network, light and dark."""

from __future__ import annotations

from html import escape

from lockstep.report.reading import Job, common_overrides
from lockstep.report.table import (
    EXPLAINED,
    QUARTILES,
    Row,
    best_of,
    columns_of,
    errors_of,
    text_of,
)

STYLE = """
:root { color-scheme: light dark;
        --line: #d0d7de; --ink: #1f2328; --paper: #ffffff; --soft: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3d444d; --ink: #e6edf3; --paper: #0d1117; --soft: #151b23; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .7rem; text-align: right; }
th:first-child, td:first-child, td.word, th.word { text-align: left; }
th { background: var(--soft); }
td.bad { color: #d1242f; font-weight: 600; }
figure { margin: 2rem 0; background: #ffffff; border: 1px solid var(--line); border-radius: 6px;
         padding: .5rem; }
figure svg { max-width: 100%; height: auto; }
figcaption { color: #1f2328; padding: .3rem .5rem; }
code, pre { background: var(--soft); padding: .1rem .3rem; border-radius: 4px; }
pre { white-space: pre-wrap; padding: .6rem; }
"""


def page(jobs: list[Job], rows: list[Row], figures: dict[str, str]) -> str:
    """The whole report as HTML; ``figures`` maps captions to SVG."""
    failed = escape("\n".join(errors_of(jobs)))
    failed = f"<h2>Not finished</h2><pre>{failed}</pre>" if failed else ""
    shared = escape(" ".join(common_overrides(jobs)))
    shared = f" All have <code>{shared}</code>." if shared else ""
    best = f"<p>{escape(found)}</p>\n" if (found := best_of(rows)) else ""
    drawn = "".join(
        f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>"
        for caption, svg in figures.items()
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Report</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>
<body><h1>Report</h1>
<p>{len(jobs)} jobs.{shared}</p>
<div class="wide">{_table(rows)}</div>
{best}<p>{escape(EXPLAINED)}</p>
{failed}{drawn}
</body></html>
"""


def _table(rows: list[Row]) -> str:
    columns = [name for name in columns_of(rows) if name not in QUARTILES]
    words = {name for name in columns if any(isinstance(r.values.get(name), str) for r in rows)}
    head = "".join(f"<th{_kind(name in words)}>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(_cell(row, name) for name in columns) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(row: Row, name: str) -> str:
    value = row.values.get(name)
    bad = (name == "status" and not row.jobs[0].finished) or value is False
    return f"<td{_kind(isinstance(value, str | bool), bad)}>{escape(text_of(row, name))}</td>"


def _kind(word: bool, bad: bool = False) -> str:
    names = ["word"] * word + ["bad"] * bad
    return f' class="{" ".join(names)}"' if names else ""
