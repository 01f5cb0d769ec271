"""A search: Hydra's ranges, trials that fail or are pruned, one study over commands and slots."""

from __future__ import annotations

import json
import math
import shlex
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from conftest import DDP2, SMALL, Command
from hydra.types import RunMode
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState
from test_slots import most_at_once, needs_two_cores

from lockstep.callbacks.prune import pruning
from lockstep.errors import UsageError, as_not_located
from lockstep.report.reading import read_jobs
from lockstep.report.table import errors_of, rows_of
from lockstep.results import Result, has_objective, objective_value, read_result
from lockstep.search.space import lowest, parse
from lockstep.search.study import (
    best_trials,
    make_pruner,
    make_sampler,
    open_study,
    overrides_of,
    tell,
    trial_of_run,
)

SEARCH = ["-m", "hydra/sweeper=optuna"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x=1,2", CategoricalDistribution(["1", "2"])),
        ("x=choice(a,[1,2])", CategoricalDistribution(["a", "[1,2]"])),
        ("x=range(1,9,2)", IntDistribution(1, 7, step=2)),
        ("x=range(5)", IntDistribution(0, 4)),
        ("x=range(0,1,0.25)", FloatDistribution(0, 0.75, step=0.25)),
        ("x=interval(1,9)", FloatDistribution(1, 9)),
        ("x=interval(0.5,9)", FloatDistribution(0.5, 9)),
        ("x=int(interval(0.0,9.0))", IntDistribution(0, 9)),
        ("x=int(tag(log,interval(1,64)))", IntDistribution(1, 64, log=True)),
        ("x=tag(log,interval(1e-4,1))", FloatDistribution(1e-4, 1, log=True)),
    ],
)
def test_hydras_overrides_are_ranges(text: str, expected: Any) -> None:
    assert parse(["y=3", text, "~z"]) == (["y=3", "~z"], {"x": expected})


def test_the_later_of_two_overrides_of_a_key_holds() -> None:
    assert parse(["x=1", "y=1,2", "x=interval(0.0,1.0)", "y=3"]) == (
        ["y=3"],
        {"x": FloatDistribution(0, 1)},
    )


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("x=interval(2,1)", "the low end must be below the high one; got 2.0 and 1.0"),
        ("x=interval(1,1)", "the low end must be below"),
        ("x=tag(log,interval(0,1))", "a logarithmic scale begins above 0; got 0.0"),
        ("x=tag(lug,interval(1,2))", "the only tag is log; got lug"),
        ("x=range(3,1)", "it must go up from 3 to below 1; the step is 1"),
        ("x=tag(log,range(1,3))", "a range has no tags"),
    ],
)
def test_a_range_that_holds_nothing_is_refused(text: str, rule: str) -> None:
    with pytest.raises(UsageError, match=rf"^x must be searched .* got .*: {rule}"):
        parse([text])


def test_a_range_has_a_value_to_try_a_config_with() -> None:
    _, space = parse(["a=int(interval(2,9))", "b=c,d", "e=range(0,1,0.5)"])
    assert lowest(space) == ["a=2", "b=c", "e=0.0"]


def study_in(directory: Path, *ranges: str, resume: bool = False, **changed: Any) -> Any:
    _, space = parse(ranges or ("x=interval(0.0,1.0)",))
    sampler = make_sampler("tpe", {}, 0)
    directions = changed.get("directions", ["minimize"])
    return open_study(directory, directions, space, sampler, resume), space


@pytest.mark.parametrize(
    ("value", "error", "state"),
    [
        (0.5, None, TrialState.COMPLETE),
        (math.nan, None, TrialState.FAIL),
        (math.inf, None, TrialState.FAIL),
        (None, None, TrialState.FAIL),
        ([0.5, 0.5], None, TrialState.FAIL),
        (0.5, "it broke", TrialState.FAIL),
    ],
)
def test_a_trial_without_its_numbers_has_failed(
    tmp_path: Path, value: Any, error: str | None, state: TrialState
) -> None:
    study, space = study_in(tmp_path)
    trial = study.ask(space)
    tell(study, trial.number, value, error)
    assert study.trials[0].state == state
    tell(study, trial.number, 7.0, None)
    assert study.trials[0].state == state, "what was told stays"
    assert bool(best_trials(study)) == (state == TrialState.COMPLETE)


def test_a_run_reports_to_its_trial_and_is_told_to_end(tmp_path: Path) -> None:
    study, space = study_in(tmp_path)
    good, bad = study.ask(space), study.ask(space)
    pruner = make_pruner("median", {"n_startup_trials": 1})
    seen = trial_of_run(tmp_path, good.number, pruner)
    seen.report(1.0, 0)
    assert not seen.should_prune()
    tell(study, good.number, 1.0, None)
    seen = trial_of_run(tmp_path, bad.number, pruner)
    assert seen.params == bad.params
    seen.report(2.0, 0)
    assert seen.should_prune()
    seen.set_user_attr("pruned", 0)
    tell(study, bad.number, 2.0, None)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE, TrialState.PRUNED]


def test_several_objectives_have_all_that_no_other_beats(tmp_path: Path) -> None:
    study, space = study_in(tmp_path, directions=["minimize", "maximize"])
    for values in ([1.0, 1.0], [2.0, 2.0], [2.0, 1.0]):
        tell(study, study.ask(space).number, values, None)
    assert [trial.number for trial in best_trials(study)] == [0, 1]


def test_of_one_objective_one_trial_is_the_best_though_others_tie(tmp_path: Path) -> None:
    study, space = study_in(tmp_path)
    for _ in range(3):
        tell(study, study.ask(space).number, 1.0, None)
    assert [trial.number for trial in best_trials(study)] == [0]


@pytest.mark.parametrize(
    ("mode", "pruner", "objective", "prune_on", "metric"),
    [
        (RunMode.MULTIRUN, "median", "val/accuracy", None, "val/accuracy"),
        (RunMode.MULTIRUN, "median", "test/accuracy", None, "val/accuracy"),
        (RunMode.MULTIRUN, "median", "val/accuracy", "val/loss", "val/loss"),
        (RunMode.MULTIRUN, None, "val/accuracy", None, None),
        (RunMode.RUN, "median", "val/accuracy", None, None),
    ],
)
def test_a_trial_is_pruned_by_what_the_search_is_for(
    tmp_path: Path,
    mode: RunMode,
    pruner: str | None,
    objective: str,
    prune_on: str | None,
    metric: str | None,
) -> None:
    """Else a search that maximizes an accuracy would end the trials with the lowest loss."""
    sweeper = {"pruner": pruner, "prune_on": prune_on}
    hydra = {"mode": mode, "sweeper": sweeper, "job": {"num": 3}}
    run: Any = SimpleNamespace(
        hydra=hydra, config=SimpleNamespace(objective=objective), directory=tmp_path / "3"
    )
    assert [callback.metric for callback in pruning(run)] == ([metric] if metric else [])


def test_a_study_is_gone_on_with_only_when_asked_and_only_the_same(tmp_path: Path) -> None:
    study, space = study_in(tmp_path)
    tell(study, study.ask(space).number, 1.0, None)
    with pytest.raises(UsageError, match=r"holds a study already. .* sweep.resume="):
        study_in(tmp_path)
    with pytest.raises(UsageError, match=r"must keep its space; .*study.db has"):
        study_in(tmp_path, "x=interval(0.0,2.0)", resume=True)
    with pytest.raises(UsageError, match=r"must keep its directions|study.db"):
        study_in(tmp_path, resume=True, directions=["maximize"])
    study, _ = study_in(tmp_path, resume=True)
    assert [trial.value for trial in study.trials] == [1.0]


@pytest.mark.parametrize("damage", ["other version", "torn", "text"])
def test_a_file_that_is_no_study_is_named_and_kept(tmp_path: Path, damage: str) -> None:
    study_in(tmp_path)
    path = tmp_path / "study.db"
    if damage == "other version":
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE version_info SET schema_version = 1")
            connection.execute("UPDATE alembic_version SET version_num = 'v9.9.9'")
    else:
        path.write_bytes(path.read_bytes()[:3000] if damage == "torn" else b"hello " * 1000)
    before = path.read_bytes()
    rule = rf"study.db must be a study that optuna {optuna.__version__} can read: "
    with pytest.raises(UsageError, match=rule):
        study_in(tmp_path, resume=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: make_sampler("tpu", {}, 0), "sampler must be one of tpe, random"),
        (lambda: make_pruner("mean", {}), "pruner must be one of median.* or null; got 'mean'"),
        (lambda: make_sampler("tpe", {"trials": 3}, 0), "sampler_options must fit .*TPESampler"),
        (lambda: make_pruner("median", {"n": 3}), "pruner_options must fit .*MedianPruner"),
    ],
)
def test_unknown_names_are_answered_with_the_known_ones(make: Any, rule: str) -> None:
    with pytest.raises(UsageError, match=rf"hydra.sweeper.{rule}"):
        make()


def test_objectives_are_metrics_by_name() -> None:
    metrics = {"val/loss": 1.0, "val/mae": 2.0}
    assert objective_value("val/mae", metrics) == 2.0
    assert objective_value("test/mae", metrics) == 2.0, "nothing was tested"
    assert objective_value(["val/loss", "test/mae"], metrics) == [1.0, 2.0]
    assert objective_value(None, metrics) is None
    assert not has_objective(["val/loss", "val/lost"], metrics)


def test_a_pruned_job_is_a_row_that_is_compared_with_nothing(tmp_path: Path) -> None:
    for name, status in enumerate(("finished", "pruned")):
        result = {"status": status, "devices": 1, "metrics": {"val/loss": name}, "overrides": []}
        (tmp_path / str(name)).mkdir()
        (tmp_path / str(name) / "result.json").write_text(json.dumps(result))
    jobs = read_jobs([tmp_path])
    assert errors_of(jobs) == []
    assert [row.values["val/loss"] for row in rows_of(jobs)] == [0, 1]
    assert rows_of(jobs)[1].values["agrees"] is None


def sweep_of(directory: Path) -> tuple[Path, dict[str, Result], Any]:
    """The newest sweep's directory, results, and study."""
    sweep = max(directory.glob("multirun/*/*"), key=lambda path: path.stat().st_mtime)
    results = {path.parent.name: read_result(path) for path in sweep.glob("*/result.json")}
    storage = f"sqlite:///{sweep / 'study.db'}"
    return sweep, results, optuna.load_study(study_name="lockstep", storage=storage)


@pytest.mark.processes
def test_a_search_under_ddp_prunes_all_ranks_and_prints_a_command_that_gives_the_best(
    train: Command,
) -> None:
    ddp = [*SMALL, *DDP2, "trainer.max_epochs=3"]
    pruner = ["hydra.sweeper.pruner=median", "+hydra.sweeper.pruner_options.n_startup_trials=1"]
    searched = ["optimizer.lr=tag(log,interval(1e-7,1e-4))", "objective=val/loss"]
    done = train(*SEARCH, "hydra.sweeper.n_trials=4", *pruner, *ddp, *searched)
    assert done.returncode == 0, done.stderr
    _, results, study = sweep_of(done.directory)
    assert sorted(results) == ["0", "1", "2", "3"]
    ended = [trial for trial in study.trials if trial.state == TrialState.PRUNED]
    assert any(trial.last_step < 2 for trial in ended), "before its last epoch"
    assert all(trial.user_attrs["pruned"] == trial.last_step for trial in ended)
    for trial, result in zip(study.trials, (results[n] for n in "0123"), strict=True):
        assert result["learning_rate"] == trial.params["optimizer.lr"]
        assert len(result["pids"]) == 2
        pruned = trial.state == TrialState.PRUNED
        assert result["status"] == ("pruned" if pruned else "finished")
        assert result["epochs"] == (trial.last_step + 1 if pruned else 3)
        assert ("test/loss" in result["metrics"]) == (not pruned)
    best = study.best_trial
    *_, title, command = done.stdout.strip().splitlines()
    assert title == f"best: #{best.number}  {best.value:.6g}"
    words = shlex.split(command.removeprefix("  python train.py "))
    again = train(*words, "hydra.run.dir=again")
    assert again.returncode == 0, again.stderr
    value = read_result(again.directory / "again" / "result.json")["metrics"]["val/loss"]
    assert value == pytest.approx(best.value, rel=1e-6)


@pytest.mark.processes
@needs_two_cores
def test_trials_run_at_once_and_failed_ones_do_not_end_the_search(train: Command) -> None:
    slots = ["hydra/launcher=slots", "hydra.launcher.slots=2"]
    random = ["hydra.sweeper.sampler=random", "hydra.sweeper.n_trials=8"]
    rates = "optimizer.lr=1e-6,1e-5,1e30,-1"
    done = train(*SEARCH, *slots, *random, *SMALL, rates, "trainer.max_epochs=2")
    assert done.returncode == 0, done.stderr
    assert most_at_once(done.stdout) == 2
    assert "Traceback" not in done.stdout + done.stderr
    sweep, results, study = sweep_of(done.directory)
    for trial in study.trials:
        rate, job = trial.params["optimizer.lr"], results[str(trial.number)]
        good = rate in ("1e-06", "1e-05")
        assert f"optimizer.lr={rate}" in job["overrides"]
        assert job["status"] == ("finished" if good else "failed")
        assert trial.state == (TrialState.COMPLETE if good else TrialState.FAIL)
    summary = json.loads((sweep / "search.json").read_text())
    assert summary["trials"]["complete"] + summary["trials"]["fail"] == 8, "some of both"
    assert summary["best"][0]["params"] == study.best_trial.params


@pytest.mark.processes
@pytest.mark.parametrize("launcher", ["basic", "slots"])
def test_a_trial_that_cannot_be_composed_has_failed(train: Command, launcher: str) -> None:
    random = ["hydra.sweeper.sampler=random", "hydra.sweeper.n_trials=4"]
    places = [f"hydra/launcher={launcher}", *random, *SMALL]
    done = train(*SEARCH, *places, "model=linear,no_such_model")
    assert done.returncode == 0, done.stderr
    _, results, study = sweep_of(done.directory)
    for trial in study.trials:
        good = trial.params["model"] == "linear"
        assert results[str(trial.number)]["status"] == ("finished" if good else "failed")
    models = {trial.params["model"]: trial.state for trial in study.trials}
    assert models == {"linear": TrialState.COMPLETE, "no_such_model": TrialState.FAIL}
    assert "Traceback" not in done.stdout + done.stderr
    assert "no_such_model" in done.stdout


@pytest.mark.processes
def test_an_interrupted_search_goes_on_with_its_trials(train: Command) -> None:
    breaking = [*SMALL, "callbacks=breaking", "trainer.max_epochs=2", "callbacks.break.batch=1"]
    search = [
        *SEARCH,
        "hydra.sweeper.sampler=random",
        *breaking,
        "optimizer.lr=interval(1e-7,1e-6)",
    ]
    first = train(*search, "hydra.sweeper.n_trials=2")
    assert first.returncode == 143
    _, results, study = sweep_of(first.directory)
    assert [trial.state for trial in study.trials] == [TrialState.RUNNING]
    assert results["0"]["status"] == "interrupted"
    drawn = study.trials[0].params

    again = train(*search, "hydra.sweeper.n_trials=2", "sweep.resume=latest")
    assert again.returncode == 143, "the second trial is stopped too"
    last = train(*search, "hydra.sweeper.n_trials=2", "sweep.resume=latest")
    assert last.returncode == 0, last.stderr
    sweep, results, study = sweep_of(first.directory)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 2
    assert study.trials[0].params == drawn
    assert study.trials[1].params != drawn
    assert sorted(results) == ["0", "1"]
    for name, result in results.items():
        assert result["resumed_from"] == str(sweep / name / "checkpoints" / "interrupted.ckpt")
    assert "sweep.resume" not in last.stdout.strip().splitlines()[-1]


@pytest.mark.processes
def test_a_trial_that_was_cut_while_being_asked_for_has_failed(train: Command) -> None:
    sweep = train("--help").directory / "sweep"
    rates = "optimizer.lr=interval(1e-7,1e-6)"
    study, _ = study_in(sweep, rates)
    study.ask()
    done = train(*SEARCH, "hydra.sweeper.n_trials=2", *SMALL, rates, f"sweep.resume={sweep}")
    assert done.returncode == 0, done.stderr
    assert [trial.state for trial in study.trials] == [TrialState.FAIL, TrialState.COMPLETE]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["optimizer.lr=0.1"], "a search needs a key with a range"),
        (["optimizer.lr=interval(2,1)"], "optimizer.lr must be searched in a range"),
        (["optimiser.lr=interval(0.1,1)"], "Did you mean optimizer?"),
        (["optimizer.lr=interval(0.1,1)", "hydra.sweeper.n_trials=0"], "n_trials must be at least"),
        (
            ["optimizer.lr=interval(0.1,1)", "objective=[test/loss,test/mae]"],
            "one direction for each objective; got minimize",
        ),
        (
            ["optimizer.lr=interval(0.1,1)", "hydra.sweeper.direction=down"],
            "must be minimize or maximize",
        ),
        (
            [
                "optimizer.lr=interval(0.1,1)",
                "hydra.sweeper.direction=[minimize,minimize]",
                "hydra.sweeper.pruner=median",
            ],
            "pruner needs one objective",
        ),
    ],
)
def test_what_cannot_be_searched_starts_nothing(
    train: Command, arguments: list[str], error: str
) -> None:
    done = train(*SEARCH, *arguments)
    assert done.returncode == 1
    assert error in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(done.directory.glob("**/result.json"))


@pytest.mark.processes
def test_a_search_in_which_nothing_is_good_has_failed(train: Command) -> None:
    bad = ["optimizer.lr=-1,-2", "hydra.sweeper.n_trials=2", "objective=[test/loss,val/loss]"]
    done = train(*SEARCH, "hydra.sweeper.direction=[minimize,maximize]", *SMALL, *bad)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == "failed: none of 2 trials was finished"
    assert "2 failed" in done.stdout


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from hydra_plugins.lockstep.search import OptunaSweeper

    for name in [name for name in sys.modules if name.startswith("lockstep.search")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optuna", None)
    install = r"pip install 'lockstep\[search\]'"
    with pytest.raises(UsageError, match=f"needs optuna.*: {install}"):
        OptunaSweeper(params={}).sweep(["x=1,2"])


def test_what_is_not_there_is_named_also_inside_another() -> None:
    from hydra.errors import InstantiationException

    outer = InstantiationException("Error locating target 'no_such.Part', set env var")
    outer.__cause__ = ModuleNotFoundError("No module named 'no_such'", name="no_such")
    told = str(as_not_located(outer, "lockstep.module.SupervisedModule"))
    assert told.startswith("no_such.Part")
    outer.__cause__ = ModuleNotFoundError("No module named 'no'", name="no")
    assert as_not_located(outer, "") is outer.__cause__, "of a module that is there"


def test_the_words_of_a_trial_are_overrides() -> None:
    assert overrides_of({"optimizer.lr": 0.5, "model": "mlp"}) == ["optimizer.lr=0.5", "model=mlp"]
