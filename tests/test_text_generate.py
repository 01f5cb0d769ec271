"""A trained language model goes on with a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Launch
from test_text import SMALL

from lockstep.errors import UsageError
from lockstep.workloads.text import generate as command
from lockstep.workloads.text.network import ByteTransformer


def test_a_run_continues_a_prompt(
    launch: Launch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = launch(*SMALL)["directory"]

    def answer(*arguments: str, source: str | Path = run) -> tuple[int, str, str]:
        capsys.readouterr()
        status = command.main([str(source), *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    status, greedy, remarks = answer("--temperature", "0", "--bytes", "20")
    assert (status, remarks) == (0, "")
    assert greedy.startswith("def ")
    network, _ = command.load_model(Path(run))
    added = command.generate(network, b"def ", 20, 0, 0)
    assert len(added) == 20
    # Greedy is what the network says is the likeliest, whatever the seed.
    scores = network(torch.tensor([list(b"def ")]))[0, -1]
    assert added[0] == int(scores.argmax())
    assert answer("--temperature", "0", "--bytes", "20", "--seed", "5")[1] == greedy
    drawn = [command.generate(network, b"def ", 60, 0.8, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert "has 40 bytes: the model sees the last 32" in answer("--prompt", "y" * 40)[2]
    assert "is empty: starting at the beginning of a line" in answer("--prompt", "")[2]
    assert command.generate(network, b"", 5, 0, 0) == command.generate(network, b"\n", 5, 0, 0)
    status, text, remarks = answer("--prompt", "a\x01")
    assert (status, text[:2]) == (0, "a\x01")
    assert r"has never seen b'\x01' in training" in remarks
    # What cannot be done.
    status, text, problem = answer("--bytes", "0")
    assert (status, text) == (1, "")
    assert "--bytes must be 1 or greater" in problem
    status, _, problem = answer("--temperature", "-1")
    assert status == 1
    assert "got 200 and -1.0" in problem
    status, _, problem = answer(source=tmp_path / "nothing")
    assert status == 1
    assert "nothing is none" in problem
    torn = Path(run) / "checkpoints/torn.ckpt"
    torn.write_bytes(b"no checkpoint")
    status, _, problem = answer(source=torn)
    assert status == 1
    assert "torn.ckpt must be a checkpoint" in problem


def test_only_the_last_bytes_of_a_prompt_count() -> None:
    torch.manual_seed(0)
    network = ByteTransformer(context=8, width=16, depth=1, heads=2).eval()
    for weight in network.parameters():
        torch.nn.init.normal_(weight)
    long, other = b"one two three", b"ein two three"
    assert long[-8:] == other[-8:]
    added = command.generate(network, long, 20, 0.8, 0)
    assert command.generate(network, other, 20, 0.8, 0) == added
    assert command.generate(network, long[:-1], 20, 0.8, 0) != added


def test_a_checkpoint_of_another_model_names_the_first_keys_that_differ(launch: Launch) -> None:
    run = Path(launch(*SMALL)["directory"])
    wider = Path(launch(*SMALL, "model.network.width=32")["directory"])
    (run / "checkpoints/other.ckpt").write_bytes((wider / "checkpoints/last.ckpt").read_bytes())
    with pytest.raises(
        UsageError, match=r"bytes\.weight is \(256, 32\), of the network \(256, 16\)"
    ):
        command.load_model(run / "checkpoints/other.ckpt")
    path = run / ".hydra/config.yaml"
    path.unlink()
    with pytest.raises(UsageError, match="there is no such file"):
        command.load_model(run / "checkpoints/last.ckpt")


def test_the_best_checkpoint_of_a_run_is_taken(launch: Launch) -> None:
    run = Path(launch(*SMALL)["directory"])
    (best,) = (run / "checkpoints").glob("epoch*.ckpt")
    assert command.checkpoint_of(run) == best


def test_a_run_of_another_kind_is_refused(launch: Launch) -> None:
    run = launch("trainer.max_epochs=1", "trainer.accelerator=cpu")["directory"]
    with pytest.raises(UsageError, match=r"must have trained a ByteTransformer; .* is a MLP"):
        command.load_model(Path(run))
