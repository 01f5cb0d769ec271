"""The workloads on texts keep the contract that `contract.Contract` states."""

from __future__ import annotations

from contract import Contract
from test_text import SMALL


class TestLanguageModel(Contract):
    config = " ".join([*SMALL, "optimizer.lr=0.01"])


class TestClassification(Contract):
    config = (
        "experiment=text/classification data.datasets.topics=[importlib,xml] "
        "data.datasets.max_words=48 model.network.classes=2 model.network.width=16 "
        "model.network.depth=1 model.network.heads=2"
    )
