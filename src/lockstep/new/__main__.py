"""``python -m lockstep.new NAME DEST``: a project of one's own; ``make new`` calls it.

Needs Python and git alone: a project is made before anything is installed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.new.project import changes, create, read_record, turn, update
from lockstep.new.rendering import EXAMPLES, Plan
from lockstep.new.template import BRANCH, write_template

STARTER = Path(__file__).resolve().parents[3]


def main() -> None:
    asked = _arguments()
    if not (STARTER / ".git").exists():
        raise UsageError(
            f"lockstep.new reads the commits of a clone; {STARTER} is none. Use: git clone"
        )
    if asked.template:
        print(f"branch {BRANCH}: {write_template(STARTER)}")
    elif asked.update:
        _update(asked.update.resolve())
    else:
        _new(asked)


def _new(asked: argparse.Namespace) -> None:
    without = tuple(name for name in asked.without.split(",") if name)
    plan = Plan(asked.name, asked.holder or f"The {asked.name} authors", without)
    if asked.here:
        turn(STARTER, plan)
        print(f"This clone is {plan.name} now; its old history is the branch starter.")
        print("Next: make train")
    elif asked.dest is None:
        raise UsageError("DEST must name the new directory, or use --here to rename this clone.")
    else:
        create(STARTER, plan, asked.dest.resolve())
        print(f"{plan.name} is in {asked.dest}, with one commit.")
        print(f"Next: cd {asked.dest} && make train")


def _update(project: Path) -> None:
    before = str(read_record(project).get("commit"))
    conflicts = update(STARTER, project)
    if conflicts is None:
        print(f"{project} has this version of the starter already.")
        return
    told = changes(STARTER, before)
    print(
        "The starter's changes since (CHANGELOG.md):" if told else "CHANGELOG.md has no new line."
    )
    print(told or "")
    if conflicts:
        print("Both sides changed, with git's marks in:")
        print("\n".join(f"  {path}" for path in conflicts))
        print("Edit them, then: git add -A && git commit. To give up: git merge --abort")
        raise SystemExit(1)
    print("Merged. Next: make check test")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lockstep.new", description=__doc__)
    parser.add_argument("name", nargs="?", default="", help="the package's name: my_project")
    parser.add_argument("dest", nargs="?", type=Path, help="a directory that is new or empty")
    parser.add_argument("--here", action="store_true", help="rename this fresh clone in place")
    parser.add_argument(
        "--without", default="", metavar="A,B", help=f"leave out examples: {', '.join(EXAMPLES)}"
    )
    parser.add_argument("--holder", help="whose copyright the licence names")
    parser.add_argument("--update", type=Path, metavar="PROJECT", help="merge this version into it")
    parser.add_argument("--template", action="store_true", help="write copier's branch")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except (UsageError, OSError) as error:
        sys.exit(f"error: {error}")
