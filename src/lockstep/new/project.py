"""Make a project of the starter, turn a clone into one, bring a later version into one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.new.git import commit, complaint, git, read, succeeds
from lockstep.new.rendering import File, Plan, render

RECORD = ".starter.json"
"""In the project: what it was made from, and how."""
TRAILER = "Starter-Commit"
"""In the message of a commit that holds the starter's files alone, as they were rendered."""


def create(starter: Path, plan: Plan, destination: Path) -> None:
    """A new repository with one commit. Raises `UsageError` if there is anything already."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UsageError(
            f"DEST must be a new or an empty directory; {destination} is there already. Choose "
            "another one, or move it away."
        )
    destination.mkdir(parents=True, exist_ok=True)
    git(destination, "init", "--quiet", "--initial-branch=main")
    made = rendered_commit(starter, plan, destination, parent=None)
    git(destination, "reset", "--quiet", "--hard", made)


def turn(clone: Path, plan: Plan) -> None:
    """Rename a fresh clone in place. Its old history stays, as the branch ``starter``.

    Raises `UsageError` if files are changed, or were committed beside the branch it is a clone of.
    """
    _demand_clean(clone)
    if succeeds(clone, "rev-parse", "--verify", "--quiet", "refs/heads/starter"):
        raise UsageError(
            "--here keeps the old history as the branch starter; there is one already. "
            "Use: git branch -m starter <another name>"
        )
    branch = git(clone, "symbolic-ref", "--short", "HEAD")
    git(clone, "branch", "starter")
    made = rendered_commit(clone, plan, clone, parent=None)
    git(clone, "reset", "--quiet", "--hard", made)
    if succeeds(clone, "remote", "get-url", "origin"):
        git(clone, "branch", "--quiet", "--unset-upstream", branch, check=False)
        git(clone, "remote", "rename", "origin", "starter")


def update(starter: Path, project: Path) -> list[str] | None:
    """Merge the starter's present version into the project; the files that conflict, or None if
    the project has it already.

    It is git's own three-way merge, from the version that the project has, of two commits that
    hold the starter's files alone: what the project changed stays. Raises `UsageError` if the
    project has uncommitted changes, or was not made by `create` or `turn`.
    """
    plan = recorded(project)
    _demand_clean(project)
    base = git(project, "log", "-1", "--format=%H", f"--grep=^{TRAILER}: ", "HEAD")
    if not base:
        raise UsageError(
            f"A commit of {project} must hold the starter's files as they were; its history has "
            f"none with {TRAILER} in its message (was it squashed?). Merge by hand once: "
            f"make new NAME={plan.name} DEST=<scratch> of both versions, and compare."
        )
    made = rendered_commit(starter, plan, project, parent=base)
    if not git(project, "diff", "--name-only", base, made, "--", ".", f":!{RECORD}"):
        return None
    version = describe(starter)
    theirs = f"starter/{version}"  # what git writes at a conflict's lower end
    git(project, "update-ref", f"refs/{theirs}", made)
    title = f"Update to the starter's {version}"
    refused = complaint(project, "merge", "--no-ff", "--quiet", "-m", title, theirs)
    git(project, "update-ref", "-d", f"refs/{theirs}")
    conflicts = git(project, "diff", "--name-only", "--diff-filter=U").splitlines()
    if refused is not None and not conflicts:
        raise UsageError(f"git merge failed in {project}, which is as before: {refused}")
    return conflicts


def rendered_commit(starter: Path, plan: Plan, repository: Path, parent: str | None) -> str:
    """A commit of the starter's newest commit, rendered; uncommitted changes do not count."""
    source = git(starter, "rev-parse", "HEAD")
    version = describe(starter)
    files = render(read(starter, source), plan)
    record = {**asdict(plan), "version": version, "commit": source}
    files[RECORD] = File("100644", (json.dumps(record, indent=2) + "\n").encode())
    return commit(
        repository, files, f"The starter's {version}\n\n{TRAILER}: {source}\n", parent=parent
    )


def describe(starter: Path) -> str:
    """The version's tag, or the nearest, or the commit."""
    return git(starter, "describe", "--tags", "--always", "HEAD")


def changes(starter: Path, commit: str) -> str | None:
    """Lines that CHANGELOG.md has since ``commit``; None if this clone does not have that."""
    if not succeeds(starter, "cat-file", "-e", f"{commit}:CHANGELOG.md"):
        return None
    compared = git(starter, "diff", "--unified=0", commit, "HEAD", "--", "CHANGELOG.md")
    return "\n".join(line[1:] for line in compared.splitlines()[4:] if line.startswith("+"))


def recorded(project: Path) -> Plan:
    """How the project was made."""
    record = read_record(project)
    try:
        return Plan(record["name"], record["holder"], tuple(record["without"]))
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"{project / RECORD} must hold name, holder and without; it lacks one ({error}). "
            f"Use: git checkout <its first commit> -- {RECORD}"
        ) from error


def read_record(project: Path) -> Mapping[str, Any]:
    path = project / RECORD
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(
            f"PROJECT must be made by `make new`, which leaves {RECORD}; {project} has none."
        ) from None
    except ValueError as error:
        raise UsageError(f"{path} must be JSON; {error}.") from error
    return record if isinstance(record, dict) else {}


def _demand_clean(repository: Path) -> None:
    if not succeeds(repository, "rev-parse", "--git-dir"):
        raise UsageError(f"{repository} must be a git repository; it is none. Use: git init")
    changed = git(repository, "status", "--porcelain", "--untracked-files=no")
    if changed:
        paths = "\n".join(f"  {line.split(maxsplit=1)[1]}" for line in changed.splitlines())
        raise UsageError(
            f"{repository} must have no uncommitted changes; there are:\n{paths}\n"
            "Commit them, or put them aside with git stash."
        )
