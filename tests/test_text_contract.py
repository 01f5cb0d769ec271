"""The language model keeps the contract that `contract.Contract` states."""

from __future__ import annotations

from contract import Contract
from test_text import SMALL


class TestLanguageModel(Contract):
    config = " ".join([*SMALL, "optimizer.lr=0.01"])
