"""Every command that a page shows is executed by a test, or stands here with the reason why not.

A new command: name its test in EXECUTED, or its reason in NOT_EXECUTED; patterns are fnmatch's.
A page may give the reason itself: ``<!-- not executed: why -->`` on the line before the block. The
notebook's cells are executed, all of them, by tests/test_notebook.py.
"""

from __future__ import annotations

import re
import shlex
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from conftest import ROOT, compose_config
from test_guarantees import EXISTING

from lockstep.placement import STRATEGIES

EXECUTED = {
    "README.md": {
        "python train.py -m trainer.strategy=*": "test_the_sweep_ends_with_what_the_readme_shows",
        "python train.py -m hydra/launcher=slots *": "test_jobs_at_once_fit_the_slots_and_compute_"
        "the_same",
        "python train.py -m hydra/sweeper=optuna *": "test_an_interrupted_search_goes_on_with_its_"
        "trials",
        "python train.py resume=*": "test_the_resume_command_goes_on_with_a_run_that_was_stopped",
        "torchrun *": "test_torchrun_ranks_share_one_directory_and_one_log",
        "python eval.py *": "test_eval_and_predict_give_what_the_run_itself_gave",
        "python predict.py *": "test_eval_and_predict_give_what_the_run_itself_gave",
        "python export.py *": "test_the_command_exports_by_the_suffix_and_says_what_it_cannot",
        "python train.py": "test_every_command_of_the_readme_works",
        "python train.py [!-]*": "test_every_command_of_the_readme_works",
        "*train.py trainer.strategy=ddp *": "test_the_ddp_command_prints_what_the_readme_shows",
    },
    "docs/from-the-documents.md": {
        "python train.py -m *": "test_torchrun_and_the_sweep_give_the_same",
        "torchrun *": "test_torchrun_and_the_sweep_give_the_same",
        "*train.py experiment=tutorial/simple_model*": "test_the_dataparallel_block_gives_the_"
        "losses_of_our_run",
        "python train.py experiment=tutorial/*": "test_each_command_prints_what_the_page_says",
    },
    "docs/checkpoints.md": {
        "python train.py resume=*": "test_a_stopped_run_goes_on_and_ends_as_if_it_had_not_stopped",
    },
    "docs/choosing-a-strategy.md": {
        "python train.py -m * compare=true": "test_a_sweep_ends_with_its_report",
        "python -m lockstep.report *": "test_several_sweeps_are_one_report",
    },
    "docs/features.md": {
        "python train.py *": "test_a_feature_does_under_a_strategy_what_the_table_says",
    },
    "docs/guarantees.md": {
        "python -m lockstep.parity *": "test_the_documents_example_is_what_is_printed",
    },
    "docs/loggers.md": {
        "python train.py *": "test_the_commands_of_the_page_leave_what_it_says",
    },
    "docs/model-parallel.md": {
        "python train.py experiment=text/language_model *": "test_split_networks_train_as_on_one_"
        "device",
        "'strategy.options.plan=*": "test_what_the_ranks_cannot_split_is_one_usage_error",
    },
    "docs/several-machines.md": {
        "torchrun *train.py *": "test_hosts_with_other_clocks_make_one_run_with_the_result_of_one_"
        "device",
        "torchrun *.doctor": "test_two_hosts_add_or_end_and_say_that_they_could_not",
        "python -m lockstep.doctor": "test_a_port_that_is_taken_is_bad_and_a_free_one_good",
    },
    "docs/slurm.md": {
        "sbatch *": "test_a_requeued_job_goes_on_in_its_directory_and_ends_with_the_uninterrupted_"
        "weights",
        "python train.py -m hydra/launcher=slurm *": "test_jobs_of_a_sweep_are_slurm_jobs_with_the_"
        "results_of_a_local_sweep",
    },
    "docs/sweeps.md": {
        "python train.py -m seed=* sweep.resume=latest": "test_finished_jobs_are_skipped_and_the_"
        "others_done",
        "python train.py -m hydra/launcher=slots *": "test_jobs_at_once_fit_the_slots_and_compute_"
        "the_same",
        "python train.py -m hydra/sweeper=optuna *": "test_a_search_under_ddp_prunes_all_ranks_and_"
        "prints_a_command_that_gives_the_best",
    },
    "docs/use.md": {
        "python eval.py *": "test_eval_and_predict_give_what_the_run_itself_gave",
        "python predict.py *": "test_eval_and_predict_give_what_the_run_itself_gave",
        "python export.py *": "test_the_command_exports_by_the_suffix_and_says_what_it_cannot",
    },
    "docs/terminal-and-editor.md": {
        "eval *": "test_tab_completes_keys_and_files",
        "python -m lockstep.schema": "test_the_schemas_are_those_of_the_dataclasses",
        "jupyter execute *": "test_each_cell_prints_what_the_notebook_shows",
    },
    # only: starter
    "docs/upgrading.md": {
        "copier *": "test_copier_makes_the_same_project_and_updates_it",
        "git tag *": "test_copier_makes_the_same_project_and_updates_it",
    },
    # end only
    "docs/your-own.md": {
        "python *": "test_its_files_train_on_one_device_to_the_same_and_keep_the_contract",
    },
    "docs/workloads/files.md": {
        "python train.py data=npy *": "test_a_run_from_files_is_the_run_from_memory",
        "python -c *": "test_the_command_of_the_page_makes_a_table_of_a_csv_file",
        "python train.py data=parquet *": "test_a_run_from_files_is_the_run_from_memory",
    },
    # only: image
    "docs/workloads/image.md": {
        "python train.py data=image_folder *": "test_pictures_train_to_their_classes_and_a_wrong_"
        "number_is_told",
        "python train.py experiment=image/*": "test_experiments_reach_their_score",
    },
    # end only
    # only: recsys
    "docs/workloads/recsys.md": {
        "python train.py experiment=recsys/*": "test_two_towers_on_movielens_are_the_same_"
        "everywhere",
    },
    # end only
    # only: text
    "docs/workloads/text.md": {
        "python train.py experiment=text/*": "test_an_experiment_reaches_its_score",
        "python -m lockstep.workloads.text.generate *": "test_a_run_continues_a_prompt",
    },
    # end only
}
"""Page -> command -> the test that runs it, or the same with fewer steps or other devices."""
NOT_EXECUTED = {
    "git clone *": "the address is the reader's; continuous integration begins with a clone",
    "python -m pytest -m *": "is make test-fast, without make",
    "make *": "needs .venv; continuous integration runs make setup, check and test",
    "pip install *": "writes to the environment that the tests run in",
    "jupyter lab *": "opens a browser; test_notebook runs the same cells in the same kernel",
    "wandb sweep *": "needs an account; test_loggers composes what the agent would run",
    "python -m benchmarks*": "takes minutes, and measures time",
    "python train.py -m experiment=compare/scaling *": "takes minutes; composed below",
}
SHELL = ("", "bash", "sh", "shell", "console")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(<!-- not executed: \w.*-->\n)?```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE
)


def commands(page: Path) -> list[str]:
    """What a person would type, but for blocks that carry their own reason."""
    return [
        line.partition("  #")[0].strip()
        for reason, kind, text in BLOCK.findall(page.read_text())
        if kind in SHELL and not reason
        for line in text.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]


SHOWN = [(page.relative_to(ROOT).as_posix(), line) for page in PAGES for line in commands(page)]
TRAIN = sorted({line for _, line in SHOWN if line.startswith("python train.py")})
FROM_A_DIRECTORY = ("resume=", "--config-dir", "experiment=mine")


def test_the_pages_show_commands() -> None:
    assert len(SHOWN) > 50
    assert len(TRAIN) > 25


@pytest.mark.parametrize(("page", "command"), SHOWN)
def test_a_command_is_executed_by_a_test_or_says_why_not(page: str, command: str) -> None:
    tests = [test for form, test in EXECUTED.get(page, {}).items() if fnmatchcase(command, form)]
    assert set(tests) <= EXISTING
    reasons = [why for form, why in NOT_EXECUTED.items() if fnmatchcase(command, form)]
    assert tests or reasons, (
        f"{page} shows {command!r}, which no test runs: name its test or the reason in {__file__}"
    )


def test_no_entry_is_left_over() -> None:
    used = {
        (page, form)
        for page, command in SHOWN
        for form in [*EXECUTED.get(page, {}), *NOT_EXECUTED]
        if fnmatchcase(command, form)
    }
    listed = {(page, form) for page, forms in EXECUTED.items() for form in forms}
    assert listed <= used
    assert set(NOT_EXECUTED) <= {form for _, form in used}


@pytest.mark.parametrize("command", TRAIN)
def test_the_keys_of_a_command_are_keys_of_the_config(command: str, tmp_path: Path) -> None:
    words = [word for word in shlex.split(command)[2:] if word != "-m"]
    keys = [word for word in words if "hydra/" not in word and "hydra." not in word]
    if any(word.startswith(FROM_A_DIRECTORY) for word in keys):
        keys = [word for word in keys if not word.startswith(FROM_A_DIRECTORY)]
    first = [re.sub(r"=([^\[({'\"]*?),.*", r"=\1", key) for key in keys if "(" not in key]
    composed = compose_config(first, tmp_path)
    assert composed.trainer.strategy in STRATEGIES
