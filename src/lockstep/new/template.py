"""The starter as a template for copier, which needs the files with places for the answers."""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import UsageError
from lockstep.new.git import commit, git, read, succeeds
from lockstep.new.project import describe
from lockstep.new.rendering import (
    EXAMPLES,
    HOLDER,
    LONGEST,
    File,
    mark,
    paths_of,
    renamed,
    with_text,
)

BRANCH = "template"
MARKS = ("@((", "))@", "@%", "%@", "@#", "#@")
ANSWERS = "@(( _copier_conf.answers_file ))@"
QUESTIONS = """\
# Written by `make template`, as all of this branch; change the files of main.
_min_copier_version: "9"
_templates_suffix: ""
_envops:
  variable_start_string: "@(("
  variable_end_string: "))@"
  block_start_string: "@%"
  block_end_string: "%@"
  comment_start_string: "@#"
  comment_end_string: "#@"
  keep_trailing_newline: true
  trim_blocks: true
  lstrip_blocks: true
name:
  type: str
  help: The package's name
  default: my_project
  validator: >-
    @% if not (name | regex_search('^[a-z][a-z0-9_]{0,LAST}$')) %@
    A lower-case letter, then at most LAST of: lower-case letters, digits and _.
    @% endif %@
holder:
  type: str
  help: Whose copyright the licence names
  default: The @(( name ))@ authors
without:
  type: str
  multiselect: true
  help: Examples to leave out
  choices: EXAMPLES
  default: []
_exclude:
  - /copier.yml
  - /.git
"""


def write_template(starter: Path) -> str:
    """Commit the newest commit as a template, as the next of the branch `BRANCH`; its hash.

    Raises `UsageError` if the branch is checked out.
    """
    if git(starter, "symbolic-ref", "--quiet", "HEAD", check=False) == f"refs/heads/{BRANCH}":
        raise UsageError(
            f"{BRANCH} must not be the branch that is checked out. Use: git switch main"
        )
    exists = succeeds(starter, "rev-parse", "--verify", "--quiet", f"refs/heads/{BRANCH}")
    made = commit(
        starter,
        template(read(starter, "HEAD")),
        f"The template of {describe(starter)}\n",
        parent=f"refs/heads/{BRANCH}^0" if exists else None,
    )
    git(starter, "branch", "--force", BRANCH, made)
    return made


def template(files: dict[str, File]) -> dict[str, File]:
    """The files with Jinja's places instead of names, and copier's questions."""
    own = paths_of("starter", files)
    left = {
        renamed(path, "@(( name ))@"): with_text(file, lambda text: _with_places(text))
        for path, file in files.items()
        if path not in own
    }
    excluded = "".join(
        f"  - \"@% if '{example}' in without %@/{renamed(path, '@(( name ))@')}@% endif %@\"\n"
        for example in EXAMPLES
        for path in sorted(paths_of(example, files) - own)
    )
    questions = QUESTIONS.replace("LAST", str(LONGEST - 1)).replace(
        "EXAMPLES", f"[{', '.join(EXAMPLES)}]"
    )
    left["copier.yml"] = File("100644", (questions + excluded).encode())
    left[ANSWERS] = File("100644", b"@(( _copier_answers | to_nice_yaml -))@\n")
    return left


def _with_places(text: str) -> str:
    found = [each for each in MARKS if each in text]
    if found:
        raise UsageError(f"No file may hold {found[0]}, with which copier's places begin or end.")
    lines = []
    for line in text.replace(HOLDER, "@(( holder ))@").splitlines(keepends=True):
        part = mark(line)
        if part is None:
            lines.append(line)
        elif part == "":
            lines.append("@% endif %@\n")
        else:
            lines.append(
                "@% if false %@\n" if part == "starter" else f"@% if '{part}' not in without %@\n"
            )
    return renamed("".join(lines), "@(( name ))@")
