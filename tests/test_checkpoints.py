"""What is in a checkpoint, and who can read it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import DDP2, ROOT, Launch, on
from left import assert_weights_equal, history, weights

from lockstep.errors import RunFailed, UsageError

pytestmark = pytest.mark.processes

RUN = ["trainer.max_epochs=1", "data.datasets.train=256"]
EAGER = "compile={backend: eager}"
"""Compiled as far as names and calls go, without a C++ compiler."""
PLAIN = {f"network.layers.{layer}.{part}" for layer in (0, 2, 4) for part in ("weight", "bias")}


@pytest.mark.parametrize(
    "where", [pytest.param([], id="auto"), pytest.param(DDP2, id="ddp", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "how",
    [[], [EAGER], ["model._target_=recording.CompiledModule"]],
    ids=["not", "in place", "wrapped"],
)
def test_a_compiled_network_is_saved_by_its_plain_names(
    launch: Launch, tmp_path: Path, where: list[str], how: list[str]
) -> None:
    launch(*RUN, *where, directory=tmp_path / "plain")
    launch(*RUN, *where, *how, directory=tmp_path / "run")
    assert weights(tmp_path / "run").keys() == PLAIN
    assert_weights_equal(weights(tmp_path / "run"), weights(tmp_path / "plain"))


def test_a_run_goes_on_compiled_or_not(launch: Launch, tmp_path: Path) -> None:
    run = tmp_path / "run"
    launch(*RUN, "scheduler=none", EAGER, directory=run)
    for epochs, how in ((2, "compile=false"), (3, EAGER)):
        more = f"trainer.max_epochs={epochs}"
        assert launch(f"resume={run}", more, how, directory=run)["epochs"] == epochs
    origin = run / "checkpoints" / "last.ckpt"
    wrapped = ["model._target_=recording.CompiledModule", "optimizer.lr=0", f"init_from={origin}"]
    launch(*RUN, *wrapped, directory=tmp_path / "wrapped")
    assert_weights_equal(weights(tmp_path / "wrapped"), weights(run), tolerance=0)


@pytest.mark.parametrize("validated", [True, False], ids=["validated", "monitoring training"])
def test_the_last_is_the_last_where_an_earlier_one_is_the_best(
    launch: Launch, tmp_path: Path, validated: bool
) -> None:
    worse = ["trainer.max_epochs=3", "callbacks.checkpoint.mode=max"]  # the loss falls
    if not validated:
        worse += ["trainer.limit_val_batches=0", "callbacks.checkpoint.monitor=train/loss"]
    result = launch(*RUN, *worse, *DDP2, directory=tmp_path / "run")
    saved = {
        path.name: torch.load(path, weights_only=True)["epoch"]
        for path in (tmp_path / "run/checkpoints").iterdir()
    }
    assert saved == {"epoch000-step000002.ckpt": 0, "last.ckpt": 2}
    metric = "val/loss" if validated else "train/loss"
    first = next(row for row in history(tmp_path / "run") if row[metric])
    assert result["best"] == {
        "metric": metric,
        "mode": "max",
        "value": pytest.approx(float(first[metric])),
        "checkpoint": "checkpoints/epoch000-step000002.ckpt",
    }


def test_a_run_that_was_moved_goes_on_with_its_best(launch: Launch, tmp_path: Path) -> None:
    worse = ["trainer.max_epochs=2", "callbacks.checkpoint.mode=max"]  # the loss falls
    before = launch(*RUN, *worse, directory=tmp_path / "run")["best"]
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "linked").symlink_to(moved)
    run = tmp_path / "linked"
    result = launch(f"resume={run}", "trainer.max_epochs=3", directory=run)
    assert result["best"] == before
    names = sorted(path.name for path in (moved / "checkpoints").iterdir())
    assert names == [Path(before["checkpoint"]).name, "last.ckpt"]


def test_a_last_that_is_a_link_is_refused(launch: Launch) -> None:
    with pytest.raises(UsageError, match=r"save_last must be true or false; got link.*=true\."):
        launch(*RUN, "callbacks.checkpoint.save_last=link")


def test_dp_refuses_what_was_compiled_in_place(launch: Launch) -> None:
    with pytest.raises(RunFailed, match="what `compile\\(\\)` has made calls the original"):
        launch(*RUN, EAGER, *on("dp"))


def test_a_module_without_a_network_is_not_compiled(launch: Launch) -> None:
    with pytest.raises(UsageError, match="compile must be true or a mapping"):
        launch(*RUN, "compile=often")


def test_the_lines_in_the_docs_load_a_checkpoint_in_plain_torch(
    launch: Launch, tmp_path: Path
) -> None:
    launch(*RUN, directory=tmp_path)
    text = (ROOT / "docs" / "checkpoints.md").read_text()
    (lines,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    lines = lines.replace("outputs/2026-12-02/10-32-10-3609", str(tmp_path))
    lines += "import sys\nassert 'lightning' not in sys.modules\n"
    check = f"{lines}print(network(torch.ones(1, 10)).item())"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    state = weights(tmp_path)
    hidden = torch.ones(1, 10)
    for layer in (0, 2):
        name = f"network.layers.{layer}"
        hidden = (hidden @ state[f"{name}.weight"].T + state[f"{name}.bias"]).relu()
    expected = hidden @ state["network.layers.4.weight"].T + state["network.layers.4.bias"]
    assert float(done.stdout) == pytest.approx(expected.item(), rel=1e-5)
