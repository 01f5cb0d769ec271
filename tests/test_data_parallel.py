"""dp against plain training on one device, on CPU; `threads` runs replicas as GPUs do."""

import copy
import pickle
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from dividing import CPU, WARNINGS, Module, assert_same_training, fit, loader, single, trainer
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import SequentialSampler
from torchmetrics.classification import MulticlassAccuracy

from lockstep.strategies.data_parallel import DataParallelStrategy
from lockstep.strategies.replicas import current_replica

pytestmark = pytest.mark.filterwarnings(*WARNINGS)


def gpu(count: int, *values: Any, id: str) -> Any:
    missing = torch.cuda.device_count() < count
    reason = f"needs {count} GPU{'s' if count > 1 else ''}"
    return pytest.param(
        *values, id=id, marks=[pytest.mark.gpu, pytest.mark.skipif(missing, reason=reason)]
    )


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("batch_size", [7, 5, 3, 1])
def test_dp_training_equals_single_device(devices, batch_size, schedule):
    data = loader(13, batch_size)
    assert_same_training(fit(devices=devices, data=data), single(data=data))


def test_dp_float64_training_equals_single_device_to_1e12(schedule):
    options = {"precision": "64-true", "max_epochs": 4}
    one, other = fit(devices=3, **options), single(**options)
    assert_same_training(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_dp_one_device_equals_plain_training_bit_by_bit(precision):
    def cls():
        return Module(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2)))

    one, other = fit(cls, devices=1, precision=precision), single(cls, precision=precision)
    assert_same_training(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"accumulate_grad_batches": 2}, id="accumulation"),
        pytest.param({"gradient_clip_val": 0.05}, id="clip-norm"),
        pytest.param(
            {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, id="clip-value"
        ),
    ],
)
def test_dp_trainer_options_equal_single_device(options, schedule):
    one = fit(devices=3, **options)
    assert_same_training(one, single(**options))
    plain = single()
    assert not torch.allclose(plain.network[0].weight, one.network[0].weight, atol=1e-4)


class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_dp_manual_optimization_equals_single_device(schedule):
    assert_same_training(fit(Manual, devices=3), single(Manual))


def mixed(dtypes: set) -> type[Module]:
    """A module that notes each replica with the type of its outputs."""

    class Mixed(Module):
        def forward(self, x):
            out = super().forward(x)
            dtypes.add((current_replica(), out.dtype))
            return out

    return Mixed


def test_dp_bf16_mixed_computes_replicas_in_bf16_and_trains(schedule):
    dtypes = set()
    one = fit(mixed(dtypes), precision="bf16-mixed")
    assert dtypes == {(0, torch.bfloat16), (1, torch.bfloat16)}
    assert_same_training(one, single(precision="bf16-mixed"), rtol=2e-2, atol=2e-2)


def test_dp_attributes_set_in_a_step_are_kept_and_hyperparameters_too(schedule):
    class Counts(Module):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.calls = 0

        def forward(self, x):
            self.seen = current_replica()
            return super().forward(x)

        def training_step(self, batch, batch_idx):
            self.calls += 1
            clone = pickle.loads(pickle.dumps(self.network))
            twin = copy.deepcopy(self)
            nn.init.zeros_(twin.network[2].weight)
            nn.init.ones_(twin.network[2].bias)
            x = batch[0]
            assert torch.equal(twin(x), torch.ones(len(x), 2))  # computed by the copy
            assert twin.seen is None  # and not divided
            torch.testing.assert_close(self(x), clone(x))
            return super().training_step(batch, batch_idx)

    globals()["Counts"] = Counts
    module = fit(Counts, data=loader(16, 8), max_epochs=2)
    assert module.calls == 4
    assert dict(module.hparams) == {"width": 3}


def test_dp_checkpoint_resumes_on_a_single_device(tmp_path, schedule):
    torch.manual_seed(0)
    first = trainer(max_epochs=1)
    first.fit(Module(), loader())
    first.save_checkpoint(tmp_path / "first.ckpt")
    resumed = Module()
    trainer("auto", 1, max_epochs=3).fit(resumed, loader(), ckpt_path=tmp_path / "first.ckpt")
    expected = single(max_epochs=3)
    torch.testing.assert_close(resumed.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)


# evaluation, logging


class Classifier(Module):
    """Loss and accuracy in the steps, on the whole batch."""

    def __init__(self):
        super().__init__(nn.Linear(4, 3))
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.accuracy.update(logits, y.argmax(1))
        self.log("accuracy", self.accuracy)
        self.log("loss", cross_entropy(logits, y.argmax(1)), batch_size=len(x))

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def on_validation_epoch_end(self):
        state = self.accuracy
        self.counted = int(state.tp.sum() + state.fn.sum())


@pytest.mark.parametrize("loop", ["validate", "test"])
def test_dp_metrics_count_every_sample_once(loop, schedule):
    torch.manual_seed(0)
    module = Classifier()
    (one,) = getattr(trainer(devices=3), loop)(module, loader(101, 8), verbose=False)
    (other,) = getattr(trainer("auto", 1), loop)(module, loader(101, 8), verbose=False)
    assert one["accuracy"] == other["accuracy"]
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    if loop == "validate":
        assert module.counted == 101


def test_dp_predictions_equal_single_device(schedule):
    torch.manual_seed(0)
    module = Classifier()
    one = trainer(devices=4).predict(module, loader(17, 7))
    other = trainer("auto", 1).predict(module, loader(17, 7))
    torch.testing.assert_close(one, other)


def test_dp_injects_no_sampler_and_loads_the_global_batch():
    sizes = []

    class Counts(Module):
        def training_step(self, batch, batch_idx):
            sizes.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    t = trainer(devices=2, max_epochs=1)
    t.fit(Counts(), loader(17, 7))
    assert sizes == [7, 7, 3]
    assert isinstance(t.train_dataloader.sampler, SequentialSampler)
    assert (t.world_size, t.global_rank) == (1, 0)


@pytest.mark.parametrize("devices", [1, 2])
def test_dp_warns_once_when_no_step_calls_forward(devices):
    class Bypasses(Module):
        def training_step(self, batch, batch_idx):
            return mse_loss(self.network(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx):
            self(batch[0])  # must not hide that training bypasses forward

    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(devices=devices).fit(Bypasses(), loader(), loader())
    told = [w for w in caught if "Call self(x) in training_step" in str(w.message)]
    assert len(told) == devices - 1


@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_dp_log_in_forward_is_refused(step, schedule):
    class Logs(Classifier):
        def forward(self, x):
            self.log("inside", x.mean())
            return super().forward(x)

        def training_step(self, batch, batch_idx):
            return cross_entropy(self(batch[0]), batch[1].argmax(1))

    t = trainer()
    run = (lambda m, d: t.fit(m, d, d)) if step == "training_step" else t.validate
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="log") as error:
        run(Logs(), loader())
    assert "logs and metrics belong in the step" in "".join(error.value.__notes__)


# configuration


def test_dp_registers_under_its_name_as_often_as_asked():
    for _ in range(2):
        DataParallelStrategy.register_strategies(StrategyRegistry)
    assert isinstance(StrategyRegistry.get("dp"), DataParallelStrategy)
    assert trainer(devices=3).strategy.parallel_devices == [CPU] * 3
    assert trainer(devices="auto").strategy.parallel_devices == [CPU]


def test_dp_ignores_the_environment_of_a_cluster(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    t = trainer()
    assert (t.world_size, t.global_rank, t.is_global_zero) == (1, 0, True)


def test_dp_refuses_several_nodes():
    with pytest.raises(ValueError, match=r"num_nodes=2\. Use ddp"):
        trainer(num_nodes=2)


def test_dp_refuses_a_compiled_lightning_module():
    module = Module()
    module.compile(backend="eager")
    with pytest.raises(ValueError, match="has made calls the original"):
        trainer().fit(module, loader())


# GPUs


class Recurrent(Module):
    def __init__(self):
        super().__init__()
        self.network = nn.LSTM(4, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(self.network(x[:, None])[0][:, -1])


@pytest.mark.parametrize(
    ("devices", "root"),
    [
        gpu(1, [0], 0, id="one"),
        gpu(2, [0, 1], 0, id="two"),
        gpu(2, [1, 0], 1, id="reversed"),
        gpu(2, [1], 1, id="second"),
    ],
)
def test_dp_on_gpus_equals_single_gpu(devices, root):
    where = set()

    class Places(Module):
        def forward(self, x):
            where.add((current_replica(), x.device.index, self.network[0].weight.device.index))
            return super().forward(x)

        def training_step(self, batch, batch_idx):
            assert self.device == self(batch[0]).device == torch.device("cuda", root)
            return super().training_step(batch, batch_idx)

    one = fit(Places, devices=devices, accelerator="gpu")
    expected = enumerate(devices) if len(devices) > 1 else [(None, root)]
    assert where == {(replica, index, index) for replica, index in expected}
    assert_same_training(one, fit(strategy="auto", devices=[0], accelerator="gpu"))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_dp_on_gpus_trains_recurrent_networks_without_warnings():
    module = fit(Recurrent, devices=2, accelerator="gpu")
    assert all(torch.isfinite(loss) for loss in module.losses)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_dp_on_gpus_computes_replicas_in_bf16_under_autocast():
    dtypes = set()
    fit(mixed(dtypes), devices=2, accelerator="gpu", precision="bf16-mixed")
    assert dtypes == {(0, torch.bfloat16), (1, torch.bfloat16)}
