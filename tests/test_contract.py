"""The project's own workloads keep the contract that `contract.Contract` states."""

from __future__ import annotations

import pytest
import test_recsys
import test_text
from contract import Contract


class TestTeacher(Contract):
    config = "data.datasets.train=401 data.datasets.test=101"


class TestDigits(Contract):
    config = (
        "experiment=image/digits model.network.width=16 data.global_batch_size=96 "
        "'data.datasets.augment={_target_: torchvision.transforms.v2.RandomErasing, p: 0.5}'"
    )


class TestLanguageModel(Contract):
    config = " ".join([*test_text.SMALL, "optimizer.lr=0.01"])


class TestRatings(Contract):
    @pytest.fixture
    def overrides(self, small: str) -> list[str]:
        return test_recsys.overrides("ratings", small)


class TestTwoTower(Contract):
    devices = 3  # the last batch of 60 leaves a rank without a share

    @pytest.fixture
    def overrides(self, small: str) -> list[str]:
        return test_recsys.overrides("two_tower", small)


small = test_recsys.small
