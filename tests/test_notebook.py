"""notebooks/first-run.ipynb is executed and prints what it shows; `lockstep.notebook`."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import nbformat
import pytest
from conftest import CONF, ROOT, on
from nbclient import NotebookClient
from nbformat import NotebookNode
from test_readme import assert_shown

from lockstep.errors import UsageError
from lockstep.notebook import run

NOTEBOOK = ROOT / "notebooks" / "first-run.ipynb"
pytestmark = pytest.mark.filterwarnings(
    # Jupyter's clients on this machine alone: TCP over the loopback interface.
    "ignore:.*Kernel is running over TCP without encryption",
)


@pytest.fixture
def beside_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like notebooks/, with ``conf/`` above it and nothing written to the project."""
    (tmp_path / "conf").symlink_to(CONF)
    folder = tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONWARNINGS", "")
    return folder


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell: NotebookNode) -> str:
    """What a cell wrote; any other kind of output would be an error's."""
    assert {output.output_type for output in cell.outputs} <= {"stream"}
    return "".join(output.text for output in cell.outputs)


def in_order(text: str) -> str:
    """Lines of the kernel and of its ranks arrive by two ways, in no certain order."""
    return "\n".join(sorted(text.splitlines(), key=lambda line: re.sub(r"^[\d:]{8}", "", line)))


@pytest.mark.processes
def test_each_cell_prints_what_the_notebook_shows(beside_conf: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    shown = [printed(cell) for cell in code_cells(notebook)]
    assert len(shown) == 8
    assert sum("finished" in text for text in shown) == 5
    client = NotebookClient(
        notebook, timeout=200, resources={"metadata": {"path": str(beside_conf)}}
    )
    # A kernel under pytest shows nothing of what other processes print: ranks, here.
    client.execute(env={k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"})
    for cell, before in zip(code_cells(notebook), shown, strict=True):
        assert_shown(in_order(printed(cell)), in_order(before))
    facts = [line for text in shown for line in text.splitlines() if line.endswith(": True")]
    assert len(facts) == 4


def test_each_run_of_a_prompt_has_its_directory_and_leaves_the_log_as_it_was(
    beside_conf: Path,
) -> None:
    handlers = logging.getLogger().handlers[:]
    small = ["experiment=tutorial/simple_model", "trainer.max_epochs=1"]
    first, second = run(*small), run(*small, "seed=1")
    assert first["directory"] != second["directory"]
    for result in (first, second):
        assert Path(result["directory"]).is_relative_to(beside_conf)
        assert (Path(result["directory"]) / "train.log").read_text().count("finished") == 1
    assert first["metrics"] != second["metrics"]
    assert logging.getLogger().handlers == handlers


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_a_class_of_a_cell_is_refused_where_processes_are_started(
    beside_conf: Path, strategy: str
) -> None:
    cell = ["model=linear", "model.network._target_=__main__.Wide"]
    with pytest.raises(UsageError, match=rf"{strategy} starts processes.*__main__\.Wide.*a file"):
        run(*on(strategy), *cell)


def test_what_a_person_can_mend_is_told_as_on_the_command_line(beside_conf: Path) -> None:
    with pytest.raises(UsageError, match=r"no conf/optimizer/adm\.yaml.*Did you mean adam"):
        run("optimizer=adm")
    with pytest.raises(UsageError, match="has no key 'max_epoch'"):
        run("trainer.max_epoch=1")


def test_a_folder_without_conf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "some" / "where"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match=r"there is none at .*where"):
        run()
