"""The default workload keeps the contract that `contract.Contract` states; mistakes break it."""

from __future__ import annotations

import pickle
import shlex
from pathlib import Path

import pytest
from conftest import Launch
from contract import Contract


class TestTeacher(Contract):
    config = "data.datasets.train=401 data.datasets.test=101"


MISTAKES = {
    "samples_are_on_dimension_0_of_batches_and_predictions": "model._target_=mistakes.Transposes",
    "one_step_lowers_the_loss_of_its_batch": "+optimizer.maximize=true",
    "8_samples_are_learnt_by_heart": "optimizer.lr=1e-7",
    "training_goes_on_from_a_checkpoint_to_the_same_weights": "model._target_=mistakes.Forgets",
    "module_and_data_travel_by_pickle": "model._target_=recording.LambdaModule",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_breaks_the_test_that_is_there_for_it(name: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, AttributeError, pickle.PicklingError)):
        getattr(Contract(), f"test_{name}")([MISTAKES[name]], tmp_path)


class Summed(Contract):
    config = (
        "data.datasets.train=401 data.datasets.test=101 optimizer=sgd +model.loss.reduction=sum"
    )


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:The loss must be a mean")
def test_a_sum_as_loss_breaks_the_comparison_with_one_device(launch: Launch) -> None:
    mistaken = Summed()
    runs = mistaken.launch_all(launch, [*shlex.split(Summed.config), "optimizer.lr=1e-5"])
    with pytest.raises(AssertionError, match="is off by"):
        mistaken.test_dp_and_ddp_train_to_the_weights_and_metrics_of_one_device(runs)
