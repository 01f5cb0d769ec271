"""What cannot be built is answered with the key that is wrong and what it may be."""

from __future__ import annotations

import pytest
from conftest import SMALL, Launch

from lockstep.errors import UsageError


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.limit_train_batches=abc", "a share of them from 0.0 to 1.0"),
        ("trainer.limit_val_batches=1.5", "it has to be in .0.0, 1.0. or an int"),
        ("trainer.overfit_batches=q", "whole number of batches"),
        ("trainer.precision=bf17", "Allowed precision values: .*'bf16-mixed'"),
        ("trainer.gradient_clip_algorithm=foo", r"Allowed algorithms: \['value', 'norm'\]"),
        ("trainer.max_epochs=-3", "must be a non-negative integer or -1"),
        ("trainer.max_time=abc", "DD:HH:MM:SS, or a mapping"),
        ("trainer.max_time=5", "DD:HH:MM:SS, or a mapping"),
        ("trainer.profiler=foo", r"one of \['simple', 'advanced'"),
        ("trainer.fast_dev_run=perhaps", "true, false or a number of batches"),
    ],
)
def test_what_the_trainer_refuses_is_named_with_its_choices(
    launch: Launch, override: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        launch(*SMALL, "callbacks=unmonitored", override)
    assert str(refused.value).startswith(f"{override} is refused by Lightning: ")


def test_of_several_arguments_only_the_wrong_one_is_named(launch: Launch) -> None:
    with pytest.raises(UsageError, match=r"^trainer.limit_test_batches=x is refused"):
        launch(*SMALL, "trainer.gradient_clip_val=1", "trainer.limit_test_batches=x")


def test_without_validation_data_what_watches_it_is_named(launch: Launch) -> None:
    run = [item for item in SMALL if item != "data=indexed"]
    own = ["data=indexed", "data.datasets._target_=recording.without_validation"]
    with pytest.raises(UsageError, match=r"callbacks\.checkpoint monitors val/loss.*unmonitored"):
        launch(*run, *own)
    assert launch(*run, *own, "callbacks=unmonitored")["status"] == "finished"


def test_without_a_test_the_objective_is_that_of_validation(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    result = launch(*SMALL, "test=false")
    assert result["status"] == "finished"
    assert "the objective is val/loss instead of test/loss" in caplog.text


def test_a_module_with_its_own_optimizer_is_told_so(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    data = ["data=only_train", "data.datasets.samples=24"]
    launch(*data, "model=own", "callbacks=unmonitored", "objective=null", "trainer.max_epochs=1")
    assert caplog.text.count("OwnModule makes its own optimizer: optimizer.* is not used") == 1
