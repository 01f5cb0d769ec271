"""What any model and data of this project must do. Inherit it, name your config, run pytest:

    class TestMine(Contract):
        config = "experiment=mine"

A LightningModule and a LightningDataModule of your own are tested as well as ours.
"""

from __future__ import annotations

import itertools
import math
import pickle
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import Launch, compose_config, on
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils._pytree import tree_map
from watching import Losses, SaveAfterFirstEpoch, samples_in, watched

from lockstep.build import Built, build
from lockstep.callbacks.resume_state import ResumeState
from lockstep.data import DataModule
from lockstep.prepare import prepare
from lockstep.randomness import seed_everything
from lockstep.results import Result
from lockstep.run import quiet_lightning

ONE_DEVICE = ["trainer.accelerator=cpu", *on("auto", 1)]
FEW = 8


class Contract:
    """The tests of one config; what may be set is below."""

    config: ClassVar[str] = ""
    """Overrides, as on the command line; or override the fixture `overrides`."""
    for_runs: ClassVar[str] = "trainer.max_epochs=2"
    """More of them for whole runs: make those short, and switch off what draws (dropout)."""
    devices: ClassVar[int] = 2
    overfit_steps: ClassVar[int] = 200
    overfit_share: ClassVar[float] = 0.1
    """Of its first value, the loss of 8 samples must fall below this within these steps."""
    tolerance: ClassVar[float] = 1e-9
    """Of weights and losses, in float64: a wrong batch or a wrong mean is off by 1e-3 or more."""
    metric_tolerance: ClassVar[float] = 1e-6
    """Of metrics: many of torchmetrics' sum in float32, whatever the precision of the run."""

    @pytest.fixture
    def overrides(self) -> list[str]:
        return shlex.split(self.config)

    def test_samples_are_on_dimension_0_of_batches_and_predictions(
        self, overrides: list[str], tmp_path: Path
    ) -> None:
        losses = Losses()
        built = objects(overrides, tmp_path, [losses])
        batch = first_batch(built.data)
        if isinstance(built.data, DataModule):
            size, samples = built.data.config.global_batch_size, len(built.data.splits.train)
            assert samples_in(batch) == min(size, samples)
        few = first(batch)
        assert samples_in(few) == min(FEW, samples_in(batch))
        fit(built, steps=1)
        assert losses.values[0].ndim == 0, "training_step must return one number"
        assert math.isfinite(losses.values[0].item())
        if is_overridden("predict_step", built.module):
            built.data.predict_dataloader = lambda: Repeated(few, 1)
            (predicted,) = built.trainer.predict(built.module, datamodule=built.data)
            assert samples_in(predicted) == samples_in(few)

    def test_one_step_lowers_the_loss_of_its_batch(
        self, overrides: list[str], tmp_path: Path
    ) -> None:
        losses = Losses()
        fit(objects(overrides, tmp_path, [losses]), steps=2)
        assert losses.values[1] < losses.values[0]

    def test_8_samples_are_learnt_by_heart(self, overrides: list[str], tmp_path: Path) -> None:
        losses = Losses()
        fit(objects(overrides, tmp_path, [losses]), steps=self.overfit_steps)
        assert losses.values[-1] < self.overfit_share * losses.values[0]

    def test_training_goes_on_from_a_checkpoint_to_the_same_weights(
        self, overrides: list[str], tmp_path: Path
    ) -> None:
        saved = tmp_path / "saved.ckpt"
        whole = objects(overrides, tmp_path, [Losses(), SaveAfterFirstEpoch(saved)], epochs=2)
        expected = fit(whole, steps=3)
        other = objects(overrides, tmp_path, [Losses()], epochs=2)
        with torch.no_grad():
            for weight in other.module.parameters():
                weight.zero_()
        assert_equal(fit(other, steps=3, checkpoint=saved), expected)

    def test_module_and_data_travel_by_pickle(self, overrides: list[str], tmp_path: Path) -> None:
        built = objects(overrides, tmp_path, [Losses()])
        module, data = pickle.loads(pickle.dumps((built.module, built.data)))
        copy = replace(objects(overrides, tmp_path, [Losses()]), module=module, data=data)
        assert_equal(fit(copy, steps=2), fit(built, steps=2))

    @pytest.mark.processes
    def test_dp_and_ddp_train_to_the_weights_and_metrics_of_one_device(
        self, runs: dict[str, Result]
    ) -> None:
        single, *_ = watched(runs["single"]["directory"])
        scale = max(value.abs().max() for value in numbers(single["weights"]).values())
        for place in ("dp", "ddp"):
            spread, *_ = watched(runs[place]["directory"])
            assert runs[place]["steps"] == runs["single"]["steps"]
            for name, value in numbers(single["weights"]).items():
                apart = (spread["weights"][name] - value).abs().max() / scale
                assert apart < self.tolerance, f"{place}: {name} is off by {apart:.1e}"
            assert len(spread["curve"]) == len(single["curve"])
            for one, other in zip(single["curve"], spread["curve"], strict=True):
                close = pytest.approx(one, rel=self.tolerance, abs=self.tolerance)
                assert other == close, place
            off = self.metric_tolerance
            for name, value in runs["single"]["metrics"].items():  # tables, too
                one, other = (
                    torch.tensor(it).double() for it in (value, runs[place]["metrics"][name])
                )
                torch.testing.assert_close(other, one, rtol=off, atol=off)

    @pytest.mark.processes
    def test_dp_and_ddp_are_given_each_sample_once(self, runs: dict[str, Result]) -> None:
        single = given(runs["single"])
        assert single["val"] or single["test"], "there must be something to evaluate"
        assert any(single[stage] % self.devices for stage in ("val", "test")), (
            f"validation or test must hold a number of samples that {self.devices} processes "
            f"cannot share evenly, or padding would not show; got {dict(single)}"
        )
        for place in ("dp", "ddp"):
            assert given(runs[place]) == single, place

    @pytest.fixture
    def runs(
        self, request: pytest.FixtureRequest, overrides: list[str], launch: Launch
    ) -> dict[str, Result]:
        """One launch of each place for all tests of a class."""
        if "_runs" not in vars(request.cls):
            request.cls._runs = self.launch_all(launch, overrides)
        return dict(request.cls._runs)

    def launch_all(self, launch: Launch, overrides: list[str]) -> dict[str, Result]:
        """Train and test on one device, with dp and with ddp, in float64."""
        directory = "${hydra:runtime.output_dir}"
        watch = f"+callbacks.watch={{_target_: watching.Watch, directory: '{directory}'}}"
        words = [*overrides, *shlex.split(self.for_runs), "trainer.precision=64-true", watch]
        places = {"single": ("auto", 1), "dp": ("dp", self.devices), "ddp": ("ddp", self.devices)}
        return {
            name: launch(*words, *on(strategy, devices))
            for name, (strategy, devices) in places.items()
        }


def objects(
    overrides: list[str], directory: Path, callbacks: list[Callback], epochs: int = 1
) -> Built:
    """What the config builds, on one device, with these callbacks instead of its own."""
    composed = compose_config([*overrides, *ONE_DEVICE], directory)
    HydraConfig.instance().set_config(composed)
    del composed["hydra"]
    try:
        run = prepare(composed)
    finally:
        HydraConfig.instance().cfg = None
    trainer = replace(
        run.config.trainer,
        max_epochs=epochs,
        max_steps=-1,
        min_epochs=None,
        min_steps=None,
        limit_train_batches=None,
        limit_val_batches=0,
        accumulate_grad_batches=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    # A schedule may ask for more steps than these tests make.
    config = replace(run.config, trainer=trainer, scheduler=None, callbacks={}, logger={})
    quiet_lightning()
    seed_everything(config.seed or 0)
    return build(replace(run, config=config), [*callbacks, ResumeState(config.seed or 0, False)])


def fit(built: Built, steps: int, checkpoint: Path | None = None) -> dict[str, Tensor]:
    """Train for ``steps`` steps an epoch on one batch of 8 samples; returns the weights."""
    few = first(first_batch(built.data))
    built.data.train_dataloader = lambda: Repeated(few, steps)
    seed_everything(0)
    only_plain = None if checkpoint is None else True
    built.trainer.fit(
        built.module, datamodule=built.data, ckpt_path=checkpoint, weights_only=only_plain
    )
    assert built.trainer.global_step, "no step was made"
    return built.module.state_dict()


class Repeated:
    """A loader of one batch; a list would be taken for several loaders."""

    def __init__(self, batch: Any, times: int) -> None:
        self.batch, self.times = batch, times

    def __len__(self) -> int:
        return self.times

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.batch, self.times)


def first_batch(data: LightningDataModule) -> Any:
    seed_everything(0)
    data.prepare_data()
    data.setup("fit")
    return next(iter(data.train_dataloader()))


def first(batch: Any) -> Any:
    """The first 8 samples of a batch."""
    return tree_map(
        lambda rows: rows[:FEW] if isinstance(rows, Tensor) and rows.ndim else rows, batch
    )


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def numbers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if value.is_floating_point()}


def given(result: Result) -> Counter[str]:
    """How many samples of each stage all ranks were given together."""
    total: Counter[str] = Counter()
    for rank in watched(result["directory"]):
        total.update(rank["samples"])
    return total
