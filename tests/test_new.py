"""A project made from this one is its own, works, and takes later versions without losing edits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement

from lockstep.errors import UsageError
from lockstep.new.git import git, read
from lockstep.new.project import TRAILER
from lockstep.new.rendering import EXAMPLES, LONGEST, STARTER_ONLY, File, Plan, render
from lockstep.new.template import template

NAMES = ["a", "my_project", "z" * LONGEST]
"""The shortest, one as people choose, and the longest; at both ends of the alphabet."""


@pytest.fixture(scope="session")
def files() -> dict[str, File]:
    """Path -> this working tree's files, as a commit would hold them."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    ).stdout
    paths = [ROOT / os.fsdecode(name) for name in listed.split(b"\0") if name]
    return {
        path.relative_to(ROOT).as_posix(): File(
            "100755" if os.access(path, os.X_OK) else "100644", path.read_bytes()
        )
        for path in paths
        if path.is_file()
    }


@pytest.fixture
def starter(files: dict[str, File], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone of this working tree, as version v0.1.0 of its `origin`."""
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "Ada")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "ada@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    origin = write(files, tmp_path / "origin")
    git(origin, "init", "--quiet", "--initial-branch=main")
    release(origin, "v0.1.0")
    git(tmp_path, "clone", "--quiet", str(origin), "starter")
    return tmp_path / "starter"


def write(files: dict[str, File], directory: Path) -> Path:
    for name, file in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
        path.chmod(int(file.mode, 8) & 0o777)
    return directory


def release(repository: Path, tag: str) -> None:
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", tag)
    git(repository, "tag", tag)


def edit(path: Path, change: Callable[[str], str]) -> None:
    before = path.read_text()
    path.write_text(change(before))
    assert path.read_text() != before


def new(starter: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lockstep.new", *arguments],
        cwd=starter,
        env={**os.environ, "PYTHONPATH": str(starter / "src")},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("without", [(), *((each,) for each in EXAMPLES), EXAMPLES])
@pytest.mark.parametrize("name", NAMES)
def test_no_line_is_laid_out_by_the_name_or_by_what_is_left_out(
    files: dict[str, File], tmp_path: Path, name: str, without: tuple[str, ...]
) -> None:
    write(render(files, Plan(name, "Ada", without)), tmp_path)
    for check in (["format", "--check"], ["check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *check, "--no-cache", "."],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout


def test_nothing_in_a_project_names_the_starter(files: dict[str, File]) -> None:
    made = render(files, Plan("my_project", "Ada Lovelace", ()))
    named = [
        path
        for path, file in made.items()
        if "lockstep" in (path.encode() + file.content).lower().decode(errors="replace")
    ]
    assert named == []
    assert b"Copyright (c) 2026 Ada Lovelace" in made["LICENSE"].content
    assert b"only: " not in made["Makefile"].content
    pictures = [path for path in files if path.endswith(".png")]
    assert pictures
    assert all(made[path].content == files[path].content for path in pictures)
    modes = {path: file.mode for path, file in files.items() if path in made}
    assert {path: made[path].mode for path in modes} == modes


def test_what_the_starter_keeps_for_itself_is_there(files: dict[str, File]) -> None:
    for place in STARTER_ONLY:
        assert any(path.startswith(place) for path in files), place


@pytest.mark.parametrize("example", EXAMPLES)
def test_what_is_left_out_is_named_nowhere(files: dict[str, File], example: str) -> None:
    everything = render(files, Plan("my_project", "Ada", ()))
    rest = render(files, Plan("my_project", "Ada", (example,)))
    assert f"docs/workloads/{example}.md" in everything.keys() - rest.keys()
    traces = (
        f"workloads.{example}",
        f"workloads/{example}",
        f"experiment={example}/",
        f'"{example}/',
    )
    left = [
        (path, trace)
        for path, file in rest.items()
        for trace in traces
        if trace.encode() in file.content
    ]
    assert left == []
    for path in everything.keys() - rest.keys():
        text = everything[path].content.decode()
        named = f"/{example}" in path or path.startswith(f"tests/test_{example}")
        assert named or f"workloads.{example}" in text or "# needs: " in text


def test_a_clone_is_renamed_in_place_and_keeps_its_history(starter: Path) -> None:
    old = git(starter, "rev-parse", "HEAD")
    done = new(starter, "my_project", "--here", "--without", "text")
    assert done.returncode == 0, done.stderr
    assert git(starter, "rev-list", "--count", "main") == "1"
    assert git(starter, "rev-parse", "starter") == old
    assert git(starter, "remote") == "starter"
    assert git(starter, "status", "--porcelain", "--untracked-files=no") == ""
    assert (starter / "src/my_project/run.py").exists()
    assert not (starter / "src/lockstep/run.py").exists()


def test_make_new_needs_nothing_installed(starter: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    done = subprocess.run(
        ["make", "new", "NAME=my_project", "DEST=../mine", f"PYTHON={bare}/bin/python"],
        cwd=starter,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine/src/my_project/run.py").exists()
    assert not (starter / ".venv").exists()
    assert git(starter, "status", "--porcelain", "--ignored") == ""


def test_a_later_version_is_merged_with_edits_on_both_sides(starter: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    assert new(starter, "my_project", str(project), "--without", "recsys").returncode == 0
    record = json.loads((project / ".starter.json").read_text())
    assert record["version"] == "v0.1.0"
    assert record["without"] == ["recsys"]
    edit(project / "src/my_project/models/mlp.py", lambda text: text + "\n\nOWN = 1\n")
    edit(project / "conf/trainer/default.yaml", lambda text: "# ours\n" + text)
    (project / "src/my_project/own.py").write_text('"""Ours."""\n')
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message", "ours")

    again = new(starter, "--update", str(project))
    assert again.returncode == 0, again.stderr
    assert "has this version of the starter already" in again.stdout

    edit(starter / "src/lockstep/models/mlp.py", lambda text: f"# lockstep, later\n{text}")
    edit(starter / "CHANGELOG.md", lambda text: text + "\n- Projects: do this.\n")
    own = (project / "pyproject.toml").read_text()
    edit(starter / "pyproject.toml", lambda text: text.replace('"0.1.0"', '"0.2.0"', 1))
    (starter / "src/lockstep/later.py").write_text('"""Of lockstep."""\n')
    edit(starter / "src/lockstep/workloads/recsys/data.py", lambda text: text + "\n# later\n")
    release(starter, "v0.2.0")
    done = new(starter, "--update", str(project))
    assert done.returncode == 0, done.stderr
    assert "- Projects: do this." in done.stdout
    merged = (project / "src/my_project/models/mlp.py").read_text()
    assert merged.startswith("# my_project, later\n")
    assert merged.endswith("OWN = 1\n")
    assert (project / "conf/trainer/default.yaml").read_text().startswith("# ours\n")
    assert (project / "src/my_project/own.py").exists()
    assert (project / "pyproject.toml").read_text() == own, "its version is its own"
    assert (project / "src/my_project/later.py").read_text() == '"""Of my_project."""\n'
    assert not (project / "src/my_project/workloads/recsys").exists()
    assert json.loads((project / ".starter.json").read_text())["version"] == "v0.2.0"
    assert git(project, "status", "--porcelain") == ""
    assert len(git(project, "log", "--format=%H", f"--grep=^{TRAILER}: ").split()) == 2


def test_where_both_changed_a_line_git_marks_it(starter: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    new(starter, "my_project", str(project))
    edit(project / "LICENSE", lambda text: text.replace("MIT License", "No licence"))
    before = git(project, "rev-parse", "HEAD")
    dirty = new(starter, "--update", str(project))
    assert dirty.returncode != 0
    assert "must have no uncommitted changes; there are:\n  LICENSE\n" in dirty.stderr
    assert git(project, "rev-parse", "HEAD") == before
    git(project, "commit", "--quiet", "--all", "--message", "ours")

    edit(starter / "LICENSE", lambda text: text.replace("MIT License", "The MIT License"))
    edit(starter / "README.md", lambda text: text + "\nLater.\n")
    release(starter, "v0.2.0")
    done = new(starter, "--update", str(project))
    assert done.returncode == 1
    assert "  LICENSE\n" in done.stdout
    assert "git merge --abort" in done.stdout
    marked = (project / "LICENSE").read_text()
    assert marked.startswith(
        "<<<<<<< HEAD\nNo licence\n=======\nThe MIT License\n>>>>>>> starter/v0.2.0\n"
    )
    assert git(project, "for-each-ref", "--format=%(refname)") == "refs/heads/main"
    assert (project / "README.md").read_text().endswith("\nLater.\n")
    edit(project / "LICENSE", lambda _: "Ours, resolved\n")
    git(project, "commit", "--quiet", "--all", "--message", "merged")
    assert "already" in new(starter, "--update", str(project)).stdout


def test_copier_makes_the_same_project_and_updates_it(starter: Path, tmp_path: Path) -> None:
    assert new(starter, "--template").returncode == 0
    git(starter, "tag", "template-0.1.0", "template")
    answers = ["--data=name=my_project", "--data=holder=Ada", "--data=without=[text]"]
    copied = tmp_path / "copied"
    copier(tmp_path, "copy", "--vcs-ref=template-0.1.0", *answers, str(starter), str(copied))
    expected = render(read(starter, "main"), Plan("my_project", "Ada", ("text",)))
    for path, file in expected.items():
        assert (copied / path).read_bytes() == file.content, path
    made = {path.relative_to(copied).as_posix() for path in copied.rglob("*") if path.is_file()}
    assert made - {".copier-answers.yml"} == set(expected)

    git(copied, "init", "--quiet", "--initial-branch=main")
    edit(copied / "LICENSE", lambda text: text + "\nOurs.\n")
    git(copied, "add", "--all")
    git(copied, "commit", "--quiet", "--message", "ours")
    edit(starter / "LICENSE", lambda text: f"Of lockstep, later.\n\n{text}")
    release(starter, "v0.2.0")
    assert new(starter, "--template").returncode == 0
    git(starter, "tag", "template-0.2.0", "template")
    copier(copied, "update", "--vcs-ref=template-0.2.0", "--defaults")
    licence = (copied / "LICENSE").read_text()
    assert licence.startswith("Of my_project, later.\n")
    assert licence.endswith("\nOurs.\n")


def copier(directory: Path, *arguments: str) -> None:
    """The command line's own, without ``--trust``: nothing of the template is run."""
    done = subprocess.run(
        [sys.executable, "-m", "copier", *arguments, "--quiet"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "My-Project",
        "lockstep",
        "json",
        "class",
        "conf",
        "9lives",
        "",
        "z" * (LONGEST + 1),
        "Tests",
        "Lockstep",
    ],
)
def test_a_name_that_cannot_be_imported_is_refused_with_one_that_can(name: str) -> None:
    with pytest.raises(
        UsageError, match=r"NAME must be a Python package's.*Use NAME=\w+\."
    ) as error:
        Plan(name, "Ada")
    proposal = str(error.value).rpartition("NAME=")[2].rstrip(".")
    assert Plan(proposal, "Ada").name == proposal


def test_git_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match=r"needs git.* Install it\."):
        git(ROOT, "status")


def test_wrong_requests_change_nothing(starter: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("mine")
    for arguments, said in (
        (["my_project", str(taken)], "DEST must be a new or an empty directory"),
        (["my_project"], "DEST must name the new directory"),
        (["my_project", str(tmp_path / "a"), "--without", "video"], "got video"),
        (["--update", str(taken)], "leaves .starter.json"),
    ):
        done = new(starter, *arguments)
        assert done.returncode != 0
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["origin", "starter", "taken"]
    assert (taken / "file").read_text() == "mine"
    assert not (taken / ".git").exists()


def test_no_file_holds_what_copier_would_take_for_a_place(files: dict[str, File]) -> None:
    assert "copier.yml" in template(files)
    with pytest.raises(UsageError, match=r"No file may hold @\(\("):
        template({**files, "README.md": File("100644", b"a @(( place")})


@pytest.mark.parametrize("without", [(), ("image",)], ids=["whole", "without-image"])
def test_an_example_takes_its_extra_with_it(
    files: dict[str, File], without: tuple[str, ...]
) -> None:
    written = render(files, Plan("my_project", "Ada", without))["pyproject.toml"].content.decode()
    extras = tomllib.loads(written)["project"]["optional-dependencies"]
    asked = [Requirement(line) for line in extras["dev"] if line.startswith("my_project[")]
    assert {extra for item in asked for extra in item.extras} <= extras.keys()
    assert ("vision" in extras, "mlxtend" in written) == (not without, not without)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("without", [(), EXAMPLES], ids=["whole", "without-examples"])
def test_a_project_passes_its_own_targets(
    files: dict[str, File], tmp_path: Path, without: tuple[str, ...]
) -> None:
    project = write(render(files, Plan("my_project", "Ada", without)), tmp_path / "my-project")
    python = [f"RUN={sys.executable}", "--assume-old=.venv/.installed"]
    (project / ".venv").mkdir()
    (project / ".venv/.installed").touch()
    for target in ("train", "check", "test-fast"):
        done = subprocess.run(
            ["make", target, *python],
            cwd=project,
            env={**os.environ, "PYTHONPATH": str(project / "src"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert "test/loss" in (project / "outputs").rglob("result.json").__next__().read_text()
