"""What docs/several-machines.md says of torchrun before hosts have met."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, environment

PAGE = (ROOT / "docs" / "several-machines.md").read_text()
SECONDS = {"read_timeout": 1, "join_timeout": 3}
"""In place of the page's: by torchrun's own, 60 and 600, nothing would end within the test."""
WITHIN_S = 55


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def command(role: str) -> list[str]:
    """The page's, on the loopback device."""
    (shown,) = set(re.findall(r"--rdzv-conf=(\S*=\d+\S*=\d+)", PAGE))
    names = [item.partition("=")[0] for item in shown.split(",")]
    limits = ",".join(f"{name}={SECONDS[name]}" for name in names)
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"),
        f"--rdzv-conf={role},{limits}",
        str(ROOT / "train.py"),
    ]


@pytest.mark.processes
@pytest.mark.slow
def test_hosts_that_do_not_meet_end_by_themselves_and_say_why(tmp_path: Path) -> None:
    said = {
        "is_host=0": "RendezvousConnectionError: The connection to the C10d store has failed",
        "is_host=1": "RendezvousTimeoutError",
    }
    started = {
        role: subprocess.Popen(
            command(role), cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
        )
        for role in said
    }
    try:
        for role, process in started.items():
            _, errors = process.communicate(timeout=WITHIN_S)
            assert (process.returncode, said[role] in errors) == (1, True), errors
            assert said[role] in PAGE
    finally:
        for process in started.values():
            process.kill()
    assert list(tmp_path.iterdir()) == [], "no line of ours has run"
