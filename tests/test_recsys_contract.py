"""Ratings and rankings keep the contract that `contract.Contract` states."""

from __future__ import annotations

import pytest
from contract import Contract
from test_recsys import overrides, small

__all__ = ["small"]  # a fixture


class TestRatings(Contract):
    @pytest.fixture
    def overrides(self, small: str) -> list[str]:
        return overrides("ratings", small)


class TestTwoTower(Contract):
    devices = 3  # the last batch of 60 leaves a rank without a share

    @pytest.fixture
    def overrides(self, small: str) -> list[str]:
        return overrides("two_tower", small)
