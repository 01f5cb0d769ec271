"""Commits of git, read and written without a working tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.new.rendering import File


def git(repository: Path, *arguments: str, stdin: bytes = b"", check: bool = True) -> str:
    """What ``git ARGUMENTS`` prints; git's own complaint as `UsageError` if it fails."""
    return _run(repository, *arguments, stdin=stdin, check=check).stdout.decode().strip()


def succeeds(repository: Path, *arguments: str) -> bool:
    return complaint(repository, *arguments) is None


def complaint(repository: Path, *arguments: str) -> str | None:
    """What git says against it; None if it did it."""
    done = _run(repository, *arguments, check=False)
    return _said(done) if done.returncode else None


def read(repository: Path, commit: str) -> dict[str, File]:
    """Path -> file of a commit."""
    listed = _run(repository, "ls-tree", "-r", "-z", "--full-tree", commit).stdout.decode()
    entries = [entry.split("\t", 1) for entry in listed.split("\0") if entry]
    wanted = "".join(f"{about.split()[2]}\n" for about, _ in entries).encode()
    packed = _run(repository, "cat-file", "--batch", stdin=wanted).stdout
    files, at = {}, 0
    for about, path in entries:
        line_end = packed.index(b"\n", at)
        size = int(packed[at:line_end].split()[2])
        files[path] = File(about.split()[0], packed[line_end + 1 : line_end + 1 + size])
        at = line_end + 1 + size + 1
    return files


def commit(repository: Path, files: dict[str, File], message: str, parent: str | None) -> str:
    """Store a commit with exactly these files; no branch and no working tree changes."""
    reference = "refs/starter/rendered"
    author = git(repository, "var", "GIT_COMMITTER_IDENT")
    stream = [
        f"commit {reference}\n".encode(),
        f"committer {author}\n".encode(),
        _data(message.encode()),
        *([f"from {parent}\n".encode()] if parent else []),
        b"deleteall\n",
    ]
    for path, file in sorted(files.items()):
        stream += [f'M {file.mode} inline "{_quoted(path)}"\n'.encode(), _data(file.content)]
    git(repository, "fast-import", "--quiet", "--force", stdin=b"".join(stream))
    made = git(repository, "rev-parse", reference)
    git(repository, "update-ref", "-d", reference)
    return made


def _data(content: bytes) -> bytes:
    return b"data %d\n%b\n" % (len(content), content)


def _quoted(path: str) -> str:
    return path.replace("\\", "\\\\").replace('"', '\\"')


def _run(
    repository: Path, *arguments: str, stdin: bytes = b"", check: bool = True
) -> subprocess.CompletedProcess[bytes]:
    command = ["git", "-C", str(repository), *arguments]
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, check=False)
    except FileNotFoundError:
        raise UsageError("This needs git, and there is none on the PATH. Install it.") from None
    if check and done.returncode:
        raise UsageError(f"git {arguments[0]} failed in {repository}: {_said(done)}")
    return done


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    return (done.stderr or done.stdout).decode(errors="replace").strip()
