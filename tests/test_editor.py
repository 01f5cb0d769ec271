"""What shells and editors complete is what the program takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import CONF, ROOT, environment
from jsonschema import Draft202012Validator

from lockstep.schema import FILES, FOLDER, schema_of, written


@pytest.mark.parametrize("name", sorted(written()))
def test_the_schemas_are_those_of_the_dataclasses(name: str) -> None:
    assert (FOLDER / name).read_text() == written()[name], "python -m lockstep.schema"


@pytest.mark.parametrize("name", FILES)
def test_every_config_file_fits_its_schema(name: str) -> None:
    kind, places = FILES[name]
    validator = Draft202012Validator(schema_of(kind))
    paths = [path for place in places for path in CONF.glob(place)]
    assert paths
    for path in paths:
        assert [
            error.message for error in validator.iter_errors(yaml.safe_load(path.read_text()))
        ] == []


def test_a_wrong_key_and_a_wrong_type_are_marked() -> None:
    validator = Draft202012Validator(schema_of(FILES["trainer"][0]))
    assert validator.is_valid({"max_epochs": 3, "devices": "${times:1,2}"})
    assert not validator.is_valid({"max_epoch": 3})
    assert not validator.is_valid({"max_epochs": "three"})
    # only one kind of what a file finds
    finder = Draft202012Validator(schema_of(FILES["find_batch"][0]))
    whole = yaml.safe_load((CONF / "find" / "batch.yaml").read_text())
    assert finder.is_valid(whole | {"limit_bytes": 8e9})
    assert not finder.is_valid(whole | {"limit_byte": 8e9})
    assert not finder.is_valid(whole | {"name": "lr"})
    described = json.loads((FOLDER / "config.schema.json").read_text())
    assert described["properties"]["seed"]["description"].startswith("Weights, data order")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("python train.py trainer.max_ep", {"trainer.max_epochs="}),
        ("python train.py strategy=ddp_sp", {"strategy=ddp_spawn"}),
    ],
)
@pytest.mark.processes
def test_tab_completes_keys_and_files(tmp_path: Path, typed: str, offered: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "-sc", "query=bash"],
        cwd=tmp_path,
        env=environment({"COMP_LINE": typed, "COMP_POINT": str(len(typed))}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert set(done.stdout.split()) == offered
