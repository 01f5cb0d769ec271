"""A config runs no code but what it may name, holds no secret, and a run listens to itself only."""

from __future__ import annotations

import ast
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL, Command, Launch, on
from packaging.requirements import Requirement

from lockstep.build import make
from lockstep.config import Target
from lockstep.errors import RunFailed, UsageError
from lockstep.secrets import refuse_secrets, refuse_secrets_in_words
from lockstep.trust import PACKAGES, check_config

KEY = "5f3a9c-not-a-real-key"


class Harm:
    """Pickled, it is a program that makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "subprocess.run",
        "builtins.eval",
        "torch.hub.load",
        "torch.load",
        "torch.serialization.load",
        "torch.utils.cpp_extension.load_inline",
        "torch.utils.collect_env.run",
        "torch.utils.model_zoo.load_url",
        "lightning.pytorch.cli.instantiate_class",
        "lockstep.new.git.git",
        "torch.distributed.launcher.api.elastic_launch",
        "torch.ops.load_library",
        "lightning.pytorch.LightningModule.load_from_checkpoint",
        "torch._C._set_default_device",
    ],
)
def test_a_target_that_runs_other_code_is_refused_by_its_name(target: str) -> None:
    with pytest.raises(UsageError, match=r"callbacks\.x\._target_ must .* got " + target):
        check_config({"callbacks": {"x": {"_target_": target}}})
    with pytest.raises(UsageError, match="must"):
        make({"_target_": target})


def test_a_target_that_only_passes_through_an_allowed_package_is_refused(tmp_path: Path) -> None:
    made = tmp_path / "made"
    nested: Target = {
        "_target_": "torch.nn.Sequential",
        "_args_": [{"_target_": "torch.utils.data.dataloader.os.mkdir", "_args_": [str(made)]}],
    }
    with pytest.raises(UsageError, match=r"dataloader\.os\.mkdir must be in one of"):
        make(nested)
    assert not made.exists()


@pytest.mark.parametrize(
    "target",
    [
        "torch.nn.functional.torch.utils.collect_env.run",
        "torch.nn.functional.torch.import_ir_module",
        "torchvision.models.resnet.torch.hub.download_url_to_file",
    ],
)
def test_a_target_that_an_allowed_part_of_torch_imports_is_refused(target: str) -> None:
    with pytest.raises(UsageError, match=f"_target_={target} must "):
        make({"_target_": target, "_partial_": True})


def test_what_the_project_names_is_allowed() -> None:
    assert make({"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}).weight.shape
    gelu = make({"_target_": "torch.nn.functional.gelu", "_partial_": True})
    assert gelu(torch.zeros(1)) == 0, "it is compiled: its home is torch._C"
    assert make({"_target_": "torch.tensor", "data": [1.0, 2.0]}).tolist() == [1, 2]
    assert "lockstep" in PACKAGES
    check_config({"model": {"_target_": "recording.OwnModule"}})


@pytest.mark.parametrize("command", ["resume", "init_from"])
def test_a_checkpoint_that_is_a_program_is_not_run(
    launch: Launch, tmp_path: Path, command: str
) -> None:
    first = launch(*SMALL)
    last = Path(first["directory"]) / "checkpoints" / "last.ckpt"
    harmed = tmp_path / "harmed"
    state = torch.load(last, weights_only=True)
    torch.save({**state, "harm": Harm(harmed)}, last)
    assert zipfile.ZipFile(last).testzip() is None
    again = {
        "resume": ["resume=" + first["directory"], "trainer.max_epochs=2"],
        "init_from": [*SMALL, f"init_from={last}"],
    }
    with pytest.raises(
        (UsageError, RunFailed), match=r"must be a checkpoint of plain .* Unsupported global"
    ) as error:
        launch(*again[command], directory=last.parents[1] if command == "resume" else None)
    assert "weights_only" not in str(error.value), "that would run it"
    assert not harmed.exists()
    torch.load(last, weights_only=False)
    assert harmed.exists(), "the file is one that would have done it"


def test_every_load_is_of_plain_tensors() -> None:
    loads = [
        (path.name, node)
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert loads
    for name, call in loads:
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert given.get("weights_only") == "True", name


@pytest.mark.parametrize(
    "word",
    [
        f"logger.wandb.api_key={KEY}",
        f"+callbacks.push.password={KEY}",
        f"++model.network.hf_token={KEY}",
        f"logger.mlflow.tracking_uri=https://ada:{KEY}@example.org",
    ],
)
@pytest.mark.processes
def test_a_secret_on_the_command_line_is_refused_and_written_nowhere(
    train: Command, word: str
) -> None:
    for arguments in ([word], ["-m", word, "seed=1,2"]):
        done = train(*arguments)
        assert done.returncode == 1
        assert "nvironment variable" in done.stderr
        assert KEY not in done.stdout + done.stderr
        assert list(done.directory.rglob("*")) == []


def test_a_secret_in_a_file_is_refused(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", KEY)
    with pytest.raises(UsageError, match=r"callbacks\.push\.api_key must not hold") as error:
        launch(*SMALL, "+callbacks.push={api_key: '${oc.env:SOME_KEY}'}")
    assert KEY not in str(error.value)


def test_ordinary_words_are_no_secrets() -> None:
    refuse_secrets_in_words(
        ["model.pad_token=0", "+model.tokens=5", "logger.wandb.api_key=null", "-m"]
    )
    refuse_secrets({"data": {"max_tokens": 8, "url": "https://example.org/a@b"}})


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_a_run_listens_on_the_loopback_device_only(launch: Launch, strategy: str) -> None:
    two = on(strategy)
    result = launch(*SMALL, *two, "callbacks=listening")
    for rank in (0, 1):
        addresses = (Path(result["directory"]) / f"listening-{rank}.txt").read_text().split()
        assert addresses, "ranks and their launching process do listen"
        assert all(address in ("127.0.0.1", "::1") for address in addresses), addresses


COMPROMISED = {
    "lightning": {"2.6.2", "2.6.3"},  # GHSA-w37p-236h-pfx3
    "pytorch-lightning": {"2.6.2", "2.6.3"},
    "torchtriton": {"2.0.0", "3.0.0"},  # not PyTorch's: dependency confusion, December 2022
    "num2words": {"0.5.15", "0.5.16"},
    "ultralytics": {"8.3.41", "8.3.42", "8.3.45", "8.3.46"},
}
"""Releases with harmful code, of packages that projects of this kind install."""


def test_no_pin_and_no_range_admits_a_compromised_release() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if "==" in line and not line.startswith("#")]
    pins = {item.name: next(iter(item.specifier)).version for item in pinned}
    assert len(pins) > 50
    assert [name for name, bad in COMPROMISED.items() if pins.get(name) in bad] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    for line in [*project["dependencies"], *extras]:
        allowed = Requirement(line)
        bad = COMPROMISED.get(allowed.name, set())
        assert [version for version in bad if allowed.specifier.contains(version)] == []
