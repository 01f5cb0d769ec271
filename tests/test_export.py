"""An exported network answers as its own does, for any number of samples, without this code."""

# needs: image, recsys, text
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import DDP2, ROOT, SMALL, Launch, environment
from hydra.utils import instantiate
from omegaconf import OmegaConf
from test_recsys import overrides, small
from test_text import SMALL as TEXT
from test_use import IMAGE, MLP, Use, use
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.results import Result
from lockstep.trained import checkpoint_of, load_network
from lockstep.use.export import export, inputs_of
from lockstep.use.tasks import exporting

__all__ = ["small", "use"]  # fixtures
SUFFIXES = ("pt2", "onnx")
CLASSIFIED = [
    "experiment=text/classification",
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=2",
    "trainer.limit_val_batches=1",
]


def trained_network(run: Result) -> nn.Module:
    """From the run's config and its best checkpoint, by none of the code that exports."""
    config = OmegaConf.load(Path(run["directory"]) / ".hydra" / "config.yaml")
    network: nn.Module = instantiate(config.model.network)
    load_network(network, checkpoint_of(Path(run["directory"])))
    return network.eval()


def answers(path: Path, *inputs: Tensor) -> Tensor:
    """What the file answers in a process that does not have this project."""
    torch.save(inputs, path.with_suffix(".inputs"))
    code = {
        ".pt2": "answer = torch.export.load(sys.argv[1]).module()(*inputs)",
        ".onnx": "import onnxruntime\n"
        "session = onnxruntime.InferenceSession(sys.argv[1])\n"
        "names = [item.name for item in session.get_inputs()]\n"
        "arrays = {name: item.numpy() for name, item in zip(names, inputs, strict=True)}\n"
        "answer = torch.from_numpy(session.run(None, arrays)[0])",
    }[path.suffix]
    program = (
        "import sys, torch\ninputs = torch.load(sys.argv[2])\n"
        f"{code}\nassert 'lockstep' not in sys.modules\ntorch.save(answer, sys.argv[3])"
    )
    files = [str(path), str(path.with_suffix(".inputs")), str(path.with_suffix(".answer"))]
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, *files], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answer: Tensor = torch.load(files[2])
    return answer


def assert_exported(run: Result, use: Use, folder: Path, *inputs: Tensor) -> None:
    with torch.no_grad():
        expected = trained_network(run)(*inputs)
    for suffix in SUFFIXES:
        output = folder / f"network.{suffix}"
        said = use(exporting, f"checkpoint={run['directory']}", f"output={output}")
        assert said["output"] == str(output)
        assert 0 <= said["metrics"]["export/difference"] <= 1e-5
        got = answers(output, *inputs)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert not list(folder.glob("*.tmp*"))


@pytest.mark.processes
def test_both_files_answer_what_the_run_predicted_wherever_it_trained(
    launch: Launch, use: Use, tmp_path: Path
) -> None:
    run = launch(*MLP, "predict=true", *DDP2)
    predicted = torch.load(run["predictions"], weights_only=True)
    assert_exported(run, use, tmp_path, torch.randn(7, 10))
    # The test data of this run, from its own config.
    config = OmegaConf.load(Path(run["directory"]) / ".hydra" / "config.yaml")
    inputs = instantiate(config.data.datasets).test[:][0]
    for suffix in SUFFIXES:
        got = answers(tmp_path / f"network.{suffix}", inputs)
        torch.testing.assert_close(got, predicted, rtol=1e-5, atol=1e-5)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("workload", ["image", "language", "classes", "ratings", "two_tower"])
def test_every_workload_is_exported(
    launch: Launch, use: Use, small: str, tmp_path: Path, workload: str
) -> None:
    if workload in ("ratings", "two_tower"):
        run = launch(*overrides(workload, small))
        users, items = torch.tensor([0, 3, 5, 1, 2]), torch.tensor([1, 0, 2, 2, 4])
        assert_exported(run, use, tmp_path, *((users, items)[: 2 if workload == "ratings" else 1]))
        return
    run = launch(*{"image": IMAGE, "language": TEXT, "classes": CLASSIFIED}[workload])
    if workload == "image":
        assert_exported(run, use, tmp_path, torch.rand(5, 1, 8, 8))
    else:
        # Another number of tokens than in training, and padding at the end of one.
        tokens = torch.randint(1, 200, (5, 6))
        tokens[0, 4:] = 0
        assert_exported(run, use, tmp_path, tokens)


class Branching(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs if inputs.sum() > 0 else -inputs


class Drifting(nn.Linear):
    """A network that answers otherwise once it has been traced."""

    def forward(self, input: Tensor) -> Tensor:
        shift = 0.0 if torch.compiler.is_compiling() else 1e-4
        return super().forward(input) + shift


def test_what_has_no_graph_or_answers_otherwise_is_refused_and_leaves_no_file(
    tmp_path: Path,
) -> None:
    inputs = {"input": torch.randn(4, 3)}
    with pytest.raises(UsageError, match=r"torch.export can trace, .* Branching is none"):
        export(Branching(), {"inputs": torch.randn(4, 3)}, tmp_path / "a.pt2")
    for suffix in SUFFIXES:
        with pytest.raises(UsageError, match=r"to 1e-05 of the largest .* differs by 1.0e-04"):
            export(Drifting(3, 1), inputs, tmp_path / f"a.{suffix}")
    assert not list(tmp_path.iterdir())


def test_inputs_are_what_the_network_is_called_with_by_name() -> None:
    network = nn.Bilinear(2, 3, 1)
    one, two = torch.randn(1, 2), torch.randn(1, 3)
    found = inputs_of(network, lambda: network(one, input2=two))
    assert list(found) == ["input1", "input2"]
    assert torch.equal(found["input2"], two.expand(2, 3)), "a graph of one sample is for one only"
    with pytest.raises(UsageError, match="was called 2 times"):
        inputs_of(network, lambda: (network(one, two), network(one, two)))


@pytest.mark.processes
def test_the_command_exports_by_the_suffix_and_says_what_it_cannot(
    launch: Launch, use: Use, tmp_path: Path
) -> None:
    run = launch(*SMALL)
    source = f"checkpoint={run['directory']}"
    line = [sys.executable, str(ROOT / "export.py"), source, "hydra.run.dir=exported"]
    done = subprocess.run(
        line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "export/difference" in done.stdout
    kept = sorted(path.name for path in (tmp_path / "exported").iterdir())
    assert kept == [".hydra", "export.log", "network.pt2", "result.json"]
    # Plain torch reads the checkpoint, without Lightning and without this project's classes.
    path = str(checkpoint_of(Path(run["directory"])))
    read = torch.load(path, weights_only=True)["state_dict"]
    exported = torch.export.load(tmp_path / "exported" / "network.pt2").state_dict
    assert all(torch.equal(read[f"network.{name}"], value) for name, value in exported.items())

    def refused(match: str, *arguments: str) -> None:
        with pytest.raises(UsageError, match=match):
            use(exporting, source, *arguments)

    refused("must end in one of .pt2, .onnx", "output=network.pth")
    refused("needs a test or predict split", "data=only_train")
    refused("done by one process; got trainer.strategy=dp", "strategy=dp", "trainer.devices=2")


def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from lockstep.use import output
    from lockstep.use.tasks import NETWORKS

    monkeypatch.setattr(output, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"needs onnx, onnxscript, .* install -e '.\[onnx\]'"):
        output.output_file(tmp_path / "n.onnx", tmp_path, NETWORKS)


def test_a_difference_counts_shapes_and_nan() -> None:
    from lockstep.use.export import _difference

    ones = torch.ones(3)
    nan = torch.tensor([1.0, torch.nan, 1.0])
    assert _difference([ones * 100], [ones * 100 + 1]) == pytest.approx(0.01)
    assert _difference([ones], [ones + 1e-3]) == pytest.approx(1e-3, rel=1e-3)
    assert _difference([ones], [torch.ones(1, 3)]) == _difference([ones], [nan]) == float("inf")
