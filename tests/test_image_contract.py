"""The digits keep the contract that `contract.Contract` states."""

from __future__ import annotations

from contract import Contract


class TestDigits(Contract):
    config = (
        "experiment=image/digits model.network.width=16 data.global_batch_size=96 "
        "'data.datasets.augment={_target_: torchvision.transforms.v2.RandomErasing, p: 0.5}'"
    )
