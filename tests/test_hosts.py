"""One run over several hosts: network namespaces, each with a name, an address and a torchrun."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from conftest import SMALL, Launch
from hosts import Host, finish, hosts, launch_script, missing, output, torchrun, where
from left import assert_weights_equal, weights
from recording import rows

from lockstep.errors import RunFailed
from lockstep.hosts import meeting as meetings
from lockstep.hosts.agreement import first_difference
from lockstep.hosts.loss import explained, sign_in
from lockstep.results import Result, read_result

TIMEOUT_S = 5
OUT_OF_STEP = ["callbacks=recording", "trainer.max_epochs=2", "optimizer.lr=1e-3"]


@pytest.fixture
def needs_hosts() -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)


def the_run(directory: Path) -> tuple[Path, Result]:
    (found,) = directory.glob("outputs/*/*/result.json")
    (run,) = directory.glob("outputs/*/*")
    assert run == found.parent, "no rank has made a directory of its own"
    return run, read_result(found)


def assert_is_the_run_of_one_device(
    run: Path, result: Result, launch: Launch, single: Path, *overrides: str
) -> None:
    reference = launch(*SMALL, *overrides, f"seed={result['seed']}", directory=single)
    assert_weights_equal(weights(run), weights(single))
    assert (result["status"], result["steps"]) == ("finished", reference["steps"])
    seen = result["samples_seen"]
    assert (seen["val"], seen["test"]) == (33, 33)
    # A run that went on in the middle of an epoch has the mean over the rest of it.
    names = reference["metrics"].keys() - ({"train/loss"} if result["resumed_from"] else set())
    for name in names:
        expected_value = pytest.approx(reference["metrics"][name], rel=1e-5)
        assert result["metrics"][name] == expected_value, name


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("count", "per_host", "static"),
    [
        pytest.param(2, 2, True, id="2-hosts-by-torch.distributed.launch"),
        pytest.param(4, 1, False, id="4-hosts-by-torchrun"),
    ],
)
def test_hosts_with_other_clocks_make_one_run_with_the_result_of_one_device(
    needs_hosts: None, launch: Launch, tmp_path: Path, count: int, per_host: int, static: bool
) -> None:
    overrides = [*SMALL, *OUT_OF_STEP, "seed=null", *where(count, per_host)]
    with hosts(count) as made:
        started = []
        for host in made:
            command = (
                launch_script(host, count, *overrides)
                if static
                else torchrun(host, count, *overrides, per_host=per_host)
            )
            started.append(host.start(command, tmp_path, {"TZ": f"UTC-{3 * host.number}"}))
            time.sleep(1.1 if host.number == 0 else 0)  # the others start in another second
        assert finish(started) == [0] * count, output(tmp_path, 0)
    run, result = the_run(tmp_path)
    assert (result["num_nodes"], result["world_size"]) == (count, 4)
    assert (run / "train.log").read_text().count("epoch 2/2") == 1
    printed = "".join(output(tmp_path, host) for host in range(count))
    assert printed.count("epoch 2/2") == 1
    seen = [i for row in rows(run) if row["stage"] == "train" for i in row["indices"]]
    assert sorted(seen) == sorted([*range(64)] * 2), "each sample once an epoch, over all hosts"
    single = tmp_path / "single"
    assert_is_the_run_of_one_device(run, result, launch, single, *OUT_OF_STEP)


@pytest.mark.cluster
def test_a_restart_of_all_hosts_goes_on_in_the_same_directory(
    needs_hosts: None, launch: Launch, tmp_path: Path
) -> None:
    """The host of the killed rank counts a restart, the other does not."""
    broken = ["callbacks=breaking", "callbacks.break.how=SIGKILL", "callbacks.break.epoch=1"]
    broken += ["callbacks.break.batch=1", "+callbacks.break.rank=3", "launch.grace_s=5"]
    overrides = [*SMALL, *OUT_OF_STEP, *broken, *where(2)]
    with hosts(2) as made:
        options = ("--max-restarts=1",)
        started = [
            host.start(torchrun(host, 2, *overrides, options=options), tmp_path) for host in made
        ]
        assert finish(started) == [0, 0], output(tmp_path, 0)
    run, result = the_run(tmp_path)
    assert output(tmp_path, 0).count("resuming from") == 1
    assert str(run / "checkpoints") in result["resumed_from"]
    assert "failed (exitcode: -9) local_rank: 1" in output(tmp_path, 1), "torchrun says who"
    single = tmp_path / "single"
    assert_is_the_run_of_one_device(run, result, launch, single, *OUT_OF_STEP)


def hide(host: Host, command: list[str]) -> list[str]:
    """The working directory of host 1 is another disk."""
    own_disk = ["sh", "-c", 'mount -t tmpfs none "$PWD" && cd "$PWD" && exec "$@"', "sh"]
    return [*own_disk, *command] if host.number == 1 else command


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("on_host1", "change", "words"),
    [
        pytest.param(
            ["optimizer.lr=0.25"],
            None,
            ["rank 0 (host0) and rank 2 (host1)", "optimizer.lr (1e-06 and 0.25)", "Start every"],
            id="another-config",
        ),
        pytest.param(
            [], hide, ["on host0 is not what", "host1 (ranks 2, 3)", "hydra.run.dir="], id="no-disk"
        ),
        pytest.param(
            ["trainer.num_nodes=1"],
            None,
            ["torchrun started 4 processes", "trainer.devices=2 trainer.num_nodes=2"],
            id="contradiction-on-one-host",
        ),
    ],
)
def test_hosts_that_do_not_fit_together_are_refused_on_each(
    needs_hosts: None,
    tmp_path: Path,
    on_host1: list[str],
    change: Callable[[Host, list[str]], list[str]] | None,
    words: list[str],
) -> None:
    with hosts(2) as made:
        started = []
        for host in made:
            overrides = [*SMALL, *where(2), *(on_host1 if host.number == 1 else [])]
            command = torchrun(host, 2, *overrides)
            started.append(host.start(change(host, command) if change else command, tmp_path))
        assert finish(started, within_s=60) == [1, 1]
    for number in (0, 1):
        printed = output(tmp_path, number)
        for word in words:
            assert word in printed, (number, printed)
        assert "epoch 1/1" not in printed
        if not on_host1 or "num_nodes" not in on_host1[0]:
            assert printed.count("error: ") == 1, printed


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("fault", "victim", "named"),
    [
        pytest.param("kill", 1, "ranks 2 (host1), 3 (host1) lost", id="host1-is-killed"),
        pytest.param("kill", 0, "rank 0 was lost", id="host0-is-killed"),
        pytest.param("cut", 1, "ranks 2 (host1), 3 (host1) lost", id="host1-is-cut-off"),
    ],
)
def test_a_lost_host_ends_the_run_and_is_named(
    needs_hosts: None, tmp_path: Path, fault: str, victim: int, named: str
) -> None:
    slow = ["model._target_=recording.SleepingModule", "trainer.max_epochs=100"]
    overrides = [*SMALL, *slow, "callbacks=recording", f"strategy.timeout_s={TIMEOUT_S}"]
    with hosts(2) as made:
        started = [host.start(torchrun(host, 2, *overrides, *where(2)), tmp_path) for host in made]
        deadline = time.monotonic() + 90
        while not list(tmp_path.glob("outputs/*/*/seen-3.jsonl")):
            assert time.monotonic() < deadline, output(tmp_path, 0)
            time.sleep(0.1)
        getattr(made[victim], fault)()
        # timeout_s, grace_s, and what torchrun's agent waits for a store that is gone.
        codes = finish(started, within_s=TIMEOUT_S + 10 + 30)
        assert all(code != 0 for code in codes)
        assert [host.pids() for host in made] == [[], []], "no orphans"
    _, result = the_run(tmp_path)
    assert result["status"] == "failed"
    assert named in result["error"]


def test_a_rank_that_lives_and_has_not_noticed_is_not_called_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 waits for rank 0, which is well: only rank 2 gives no sign of life."""
    # It ends with this function, and with it the signs of life, whose threads have clients.
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [dist.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(3)]
    ranks = [meetings.Meeting(rank, 3, clients[rank], None, "token") for rank in range(3)]
    for met in ranks[:2]:
        sign_in(met)
    ranks[2].put("host/2", "host1")
    monkeypatch.setattr(meetings, "_held", [ranks[0]])
    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "MASTER_ADDR": 0, "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    run: Any = SimpleNamespace(placement=SimpleNamespace(kind="launched", rank=0))
    seen = explained(run, ConnectionError("reset"), RunFailed("gloo: Connection closed by peer"))
    assert (
        str(seen) == "rank 2 (host1) lost (killed, or the network is cut): ConnectionError: reset"
    )


def test_code_that_differs_between_hosts_is_told_with_its_versions() -> None:
    one = {"host": "a", "code": "1111", "torch": "2.6.0", "config": {"seed": "0"}}
    other = {**one, "host": "b", "code": "2222"}
    assert first_difference([one, one]) is None
    message = first_difference([one, one, other])
    assert message is not None
    assert "rank 0 (a) and rank 2 (b) differ in code (1111 and 2222)" in message
