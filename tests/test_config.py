"""The schema and the files in conf/: composed, compared with Lightning, imported, answered."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from conftest import CONF, ROOT, compose_config, environment
from hydra.utils import get_class, get_method
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf

from lockstep.config import Config, TrainerConfig, as_config
from lockstep.exchange.chosen import CLASSES
from lockstep.modelparallel.chosen import CLASSES as SPLITTING
from lockstep.placement import MODEL_PARALLEL, STRATEGIES

FILES = sorted(path for path in CONF.glob("**/*.yaml"))
GROUPS = [path.relative_to(CONF).with_suffix("") for path in FILES if path.parent != CONF]


def test_every_argument_of_the_trainer_has_a_key() -> None:
    arguments = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    assert {item.name for item in fields(TrainerConfig)} == arguments - {"logger", "callbacks"}


def test_defaults_are_those_of_the_trainer_where_not_said_otherwise() -> None:
    ours = {"devices", "enable_autolog_hparams", "strategy"}
    signature = inspect.signature(Trainer.__init__).parameters
    for item in fields(TrainerConfig):
        if item.name not in ours:
            assert item.default == signature[item.name].default, item.name


def test_every_strategy_has_a_class() -> None:
    assert set(STRATEGIES) == {"auto", "dp", *MODEL_PARALLEL, *CLASSES}
    assert set(MODEL_PARALLEL) == {"deepspeed", *SPLITTING}


def choose(group: Path) -> str:
    parent = group.parent.as_posix()
    if parent.startswith("experiment/"):
        return f"experiment={group.relative_to('experiment').as_posix()}"
    return f"{parent}={group.name}"


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_every_file_composes_and_its_targets_exist(group: Path, tmp_path: Path) -> None:
    overrides = [] if group.parts[0] == "hydra" else [choose(group)]
    composed = compose_config(overrides, tmp_path)
    del composed["hydra"]
    config = as_config_with_directory(composed, tmp_path)
    targets = list(_targets(OmegaConf.to_container(OmegaConf.structured(config))))
    assert targets
    for target in targets:
        try:
            get_class(target)
        except ValueError:
            assert callable(get_method(target))


def as_config_with_directory(composed: DictConfig, directory: Path) -> Config:
    OmegaConf.register_new_resolver("hydra", lambda _: str(directory), replace=True)
    return as_config(composed)


def _targets(value: Any) -> Any:
    if isinstance(value, dict):
        if "_target_" in value:
            yield value["_target_"]
        for item in value.values():
            yield from _targets(item)
    elif isinstance(value, list):
        for item in value:
            yield from _targets(item)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(CONF).as_posix())
def test_every_file_opens_with_what_it_does_and_how_to_run_it(path: Path) -> None:
    lines = path.read_text().splitlines()
    comment = list(takewhile(lambda line: line.startswith("#"), lines))
    rule = f"{path} must begin with two lines of # comment or more, one with python train.py"
    assert len(comment) >= 2, rule
    assert any("python train.py" in line for line in comment), rule


def answer(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> tuple[int, str, bool]:
    """Exit status, stdout and stderr, and whether torch was imported."""
    code = (
        "import atexit, runpy, sys;"
        "atexit.register(lambda: print('torch imported:', 'torch' in sys.modules));"
        f"sys.argv = {['train.py', *arguments]!r};"
        f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment(env), capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr, "torch imported: True" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trainer.strategy=dpp"], ["trainer.strategy", "'dpp'", "ddp_spawn", "Did you mean dp?"]),
        (["trainer.devcies=2"], ["trainer.devcies", "Did you mean devices?", "accelerator"]),
        (["model=linaer"], ["model=linaer", "There are: ", "linear, ", "Did you mean linear?"]),
        (["lr=0.1"], ["no key 'lr'", "Did you mean optimizer.lr?"]),
        (["max_epochs=3"], ["Did you mean trainer.max_epochs?"]),
        (["epochs=3"], ["Did you mean trainer.max_epochs"]),
        (["batch_size=3"], ["mean data.global_batch_size or data.eval_batch_size or "]),
        (["trainer.strategy=DDP"], ["got 'DDP'", "Did you mean ddp?"]),
        (["optimizer.lr", "=", "0.1"], ["optimizer.lr must be key=value, without blanks"]),
        (["resume=nowhere.ckpt"], ["nowhere.ckpt holds none", "use resume=latest"]),
        (["resume=latest"], ["resume=latest needs a run in outputs/ that began to train"]),
        (["modle=linear"], ["modle", "Did you mean model?"]),
        (["seed=abc"], ["seed", "'abc'", "Integer. Use a whole number, such as 2."]),
        (["test=maybe"], ["test: ", "'maybe'", "Use true or false."]),
        (["launch.grace_s=soon"], ["'soon'", "Use a number"]),
        (["seed=-1"], ["seed must be 0 or greater", "-1"]),
        (["trainer.max_epochs=1.5"], ["trainer.max_epochs", "'1.5'"]),
        (["model.network.widht=3"], ["model.network.widht", "Did you mean width?"]),
        (["optimizer.lr=abc"], ["optimizer.lr must be a number", "'abc'"]),
        (["trainer.devices=0"], ["trainer.devices", "got 0", "CPU cores"]),
        (["trainer.devices=-3"], ["got -3"]),
        (["trainer.devices=two"], ["got 'two'"]),
        (["data.global_batch_size=31", "trainer.devices=2"], ["got 31 and 2. Use 30 or 32"]),
        (["data.global_batch_size=0"], ["got 0. Use 1 or 2"]),
        (["trainer.strategy=dp", "trainer.num_nodes=2"], ["trainer.num_nodes=2", "ddp"]),
        (["trainer.accumulate_grad_batches=0"], ["greater than 0; got 0"]),
        (["strategy.timeout_s=-1"], ["strategy.timeout_s", "got -1"]),
        (["data.global_batch_size=-8"], ["got -8. Use 1 or 2"]),
        (["checkpoint=a=b"], ["needs quotes"]),
        (["trainer.precision=16-mixed"], ["got trainer.precision=16-mixed", "Use", "bf16-mixed"]),
        (["experiment=tutorial/liner"], ["experiment/tutorial", "Did you mean linear?"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_answered_without_torch(
    arguments: list[str], words: list[str], tmp_path: Path
) -> None:
    status, text, torch_imported = answer(*arguments, cwd=tmp_path)
    assert status == 1
    assert not torch_imported
    message = next(line for line in text.splitlines() if line.startswith("error: "))
    for word in words:
        assert word in text, message
    assert "Traceback" not in text
    assert not (tmp_path / "nowhere.ckpt").exists()


def test_names_in_folders_are_offered_beside_those_at_the_top(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/houses.yaml").touch()
    status, text, _ = answer("--config-dir", str(tmp_path), "experiment=house", cwd=tmp_path)
    assert status == 1
    assert re.search(r"There are: .*houses.*tutorial/linear.* Did you mean houses\?", text)


@pytest.mark.parametrize("flag", ["--help", "--cfg=job"])
def test_help_and_config_are_shown_without_torch(flag: str, tmp_path: Path) -> None:
    status, text, torch_imported = answer(*flag.split("="), cwd=tmp_path)
    assert status == 0, text
    assert not torch_imported
    assert ("python train.py -m" in text) == (flag == "--help")
    assert ("gradient_clip_val: null" in text) == (flag != "--help")


def test_a_setting_with_dashes_is_told_how_settings_are_given(tmp_path: Path) -> None:
    status, text, torch_imported = answer("--lr", "0.1", cwd=tmp_path)
    assert (status, torch_imported) == (2, False)
    assert "unrecognized arguments: --lr" in text
    assert "A setting is key=value, without dashes" in text
    status, text, _ = answer("model=mlp", "-m", "seed=1,2", cwd=tmp_path)
    assert status == 2
    assert "Flags such as -m come first." in text
    status, text, _ = answer("--info=everything", cwd=tmp_path)
    assert status == 2
    assert "invalid choice" in text
    assert "A setting is" not in text


def test_a_stale_distributed_environment_is_refused_by_name(tmp_path: Path) -> None:
    status, text, _ = answer(cwd=tmp_path, env={"LOCAL_RANK": "1", "WORLD_SIZE": "2"})
    assert status == 1
    assert "LOCAL_RANK=1, WORLD_SIZE=2 is set" in text
    assert "unset LOCAL_RANK WORLD_SIZE" in text


def test_a_key_that_the_model_of_a_run_to_go_on_with_has_not_is_explained(tmp_path: Path) -> None:
    run = tmp_path / "run"
    status, text, torch_imported = answer(f"resume={run}", "model.network.kernel=3", cwd=tmp_path)
    assert (status, torch_imported) == (1, False)
    assert "A run that goes on keeps its model and data: leave out what does not change." in text


@pytest.mark.parametrize(
    "directory",
    [
        "/dev/null/run",
        "file/run",
        pytest.param(
            "/sys/kernel/run",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="root may write elsewhere"),
        ),
    ],
)
def test_a_run_directory_that_cannot_be_made_is_named(directory: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    status, text, torch_imported = answer(f"hydra.run.dir={directory}", cwd=tmp_path)
    assert (status, torch_imported) == (1, False)
    assert f"error: {directory} cannot be written: " in text


def test_a_directory_with_a_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "result.json").write_text('{"status": "finished"}')
    status, text, torch_imported = answer("hydra.run.dir=run", cwd=tmp_path)
    assert (status, torch_imported) == (1, False)
    assert "must not hold another run" in text
    assert "status: finished" in text
    assert (run / "result.json").read_text() == '{"status": "finished"}'
    assert not (run / ".hydra").exists()


@pytest.mark.skipif(
    os.geteuid() == 0 if hasattr(os, "geteuid") else True,
    reason="permissions do not stop the user root, and Windows has others",
)
def test_a_read_only_run_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    status, text, _ = answer("hydra.run.dir=locked/run", cwd=tmp_path)
    assert status == 1
    assert "locked/run cannot be written: Permission denied" in text
