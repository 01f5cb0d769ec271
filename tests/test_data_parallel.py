"""dp against plain training on one device, on CPU; `threads` runs replicas as GPUs do."""

import copy
import dataclasses
import pickle
import threading
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from contextvars import ContextVar
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lockstep.strategies import replicas as dp
from lockstep.strategies import scatter_gather
from lockstep.strategies.data_parallel import DataParallelStrategy
from lockstep.strategies.replicas import current_replica

pytestmark = pytest.mark.filterwarnings(
    "error",
    "ignore:.*does not have many workers",
    "ignore:GPU available but not used",
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # torch.compile looks at it
    r"ignore:.*isinstance\(treespec, LeafSpec\)",  # Lightning 2.6 on torch 2.14
)
CPU = torch.device("cpu")
Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Tensor
    tag: str


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["turns", "threads"])
def schedule(request, monkeypatch):
    """CPU devices take turns; `threads` computes them at once, each from a thread, as GPUs are."""
    if request.param == "threads":
        monkeypatch.setattr(dp, "share_cores", lambda _: False)
    return request.param


@pytest.fixture
def threads(monkeypatch):
    monkeypatch.setattr(dp, "share_cores", lambda _: False)


def gpu(count: int, *values: Any, id: str) -> Any:
    missing = torch.cuda.device_count() < count
    reason = f"needs {count} GPU{'s' if count > 1 else ''}"
    return pytest.param(
        *values, id=id, marks=[pytest.mark.gpu, pytest.mark.skipif(missing, reason=reason)]
    )


class Module(pl.LightningModule):
    """A regression whose step calls ``self(x)``; tests override what they need."""

    def __init__(self, network: nn.Module | None = None) -> None:
        super().__init__()
        self.network = network or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        return self.network(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = mse_loss(self(x), y)
        self.losses.append(loss.detach().cpu())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader(samples: int = 17, batch_size: int = 7) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 4, generator=generator)
    y = torch.randn(samples, 2, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def trainer(strategy: str = "dp", devices: Any = 2, accelerator: str = "cpu", **kwargs: Any):
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        strategy=strategy, devices=devices, accelerator=accelerator, **options | kwargs
    )


def fit(cls: Any = Module, strategy: str = "dp", devices: Any = 2, data: Any = None, **kwargs: Any):
    """A module trained from seed 0, moved to CPU by the teardown."""
    torch.manual_seed(0)
    module = cls()
    trainer(strategy, devices, **kwargs).fit(module, data or loader())
    return module


def single(cls: Any = Module, data: Any = None, **kwargs: Any):
    return fit(cls, "auto", 1, data, **kwargs)


def assert_same_training(one: Module, other: Module, **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(torch.stack(one.losses), torch.stack(other.losses), **tolerance)
    torch.testing.assert_close(one.state_dict(), other.state_dict(), **tolerance)


def divide(module: nn.Module, *args: Any, devices: int = 2, **kwargs: Any) -> Any:
    """The strategy's four steps on a bare module."""
    sizes = scatter_gather.chunk_sizes({"args": args, "kwargs": kwargs}, devices)
    used = [CPU] * max(1, len(sizes))
    replicas = dp.Replicas(used)
    try:
        chunks = scatter_gather.split((args, kwargs), sizes, used)
        return scatter_gather.merge(replicas.run(dp.replicate(module, used), chunks), sizes, CPU)
    finally:
        replicas.close()


class Call(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


# split


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("samples", [1, 2, 3, 5, 7, 8, 25])
def test_dp_chunks_equal_torch_chunk(samples, devices):
    expected = [len(chunk) for chunk in torch.arange(samples).chunk(devices)]
    assert scatter_gather.chunk_sizes(torch.zeros(samples, 3), devices) == expected


def test_dp_empty_batch_uses_one_replica():
    assert scatter_gather.chunk_sizes(torch.zeros(0, 3), 4) == [0]
    assert divide(nn.Linear(3, 2), torch.zeros(0, 3)).shape == (0, 2)


def test_dp_splits_tensors_and_passes_the_rest_to_every_replica():
    x, scale = torch.arange(5.0), torch.tensor(3.0)
    inputs = {"a": (x, [x]), "b": Pair(x, "s"), "c": Sample(x, "t"), "n": 3, "scale": scale}
    inputs["ordered"] = OrderedDict(x=x)
    inputs["default"] = defaultdict(list, x=x)
    first, second = scatter_gather.split(inputs, [3, 2], [CPU, CPU])
    for part, rows in ((first, x[:3]), (second, x[3:])):
        leaves = [part["a"][0], part["a"][1][0], part["b"].left, part["c"].x]
        leaves += [part["ordered"]["x"], part["default"]["x"]]
        assert all(torch.equal(leaf, rows) for leaf in leaves)
        assert (part["b"].right, part["c"].tag, part["n"]) == ("s", "t", 3)
        assert part["scale"] is scale
        assert {key: type(value) for key, value in part.items()} == {
            key: type(value) for key, value in inputs.items()
        }
    assert torch.equal(inputs["c"].x, x)  # the caller's own are untouched


def test_dp_inputs_that_disagree_about_the_batch_are_refused():
    with pytest.raises(
        ValueError, match=r"inputs\['args'\]\[0\]: 4, inputs\['kwargs'\]\['mask'\]: 3"
    ):
        divide(nn.Linear(3, 2), torch.zeros(4, 3), mask=torch.zeros(3))


def test_dp_packed_sequence_is_refused():
    packed = nn.utils.rnn.pack_sequence([torch.zeros(3), torch.zeros(2)])
    with pytest.raises(ValueError, match=r"inputs\['args'\]\[0\] is PackedSequence"):
        divide(nn.Identity(), packed)


# merge


@pytest.mark.parametrize("samples", [7, 5, 3, 2, 1])
def test_dp_nested_outputs_equal_single_device(samples, schedule):
    def outputs(x):
        deep = {"pair": Pair(x * 2, [x.sum(1), None]), "sample": Sample(x + 1, "name")}
        return x, deep, (x.repeat_interleave(3, 0), 3, 0.5, "text")

    x = torch.randn(samples, 4)

    def assert_same(path, pair):
        if isinstance(pair[1], Tensor):
            torch.testing.assert_close(*pair, rtol=0, atol=0, msg=path)
        else:
            assert pair[0] == pair[1], path

    x = torch.randn(samples, 4)
    scatter_gather.map_leaves(
        assert_same, "output", [divide(Call(outputs), x, devices=3), outputs(x)]
    )


def test_dp_output_none_stays_none(schedule):
    assert divide(Call(lambda _: None), torch.zeros(4, 1)) is None


REFUSED = {
    "number": (lambda x: {"x": x, "meta": x.sum().item()}, r"output\['meta'\]"),
    "string": (lambda x: [x, str(len(x))], r"output\[1\]"),
    "shape": (lambda x: (x, x.shape), r"output\[1\]\[0\]"),
    "array": (lambda x: Pair(x, x.numpy()), r"output\[1\]"),
    "0-dim": (lambda x: {"loss": x.mean()}, r"output\['loss'\] is one. A mean of chunk means"),
    "bare-0-dim": (lambda x: x.mean(), r"output is one. A mean of chunk means"),
    "ragged": (lambda x: Sample(x[: len(x) // 2], ""), r"output\.x is \(2, 4\)"),
    "weights": (lambda _: {"w": torch.zeros(5, 2)}, r"output\['w'\] is \(5, 2\)"),
    "padding": (lambda x: {"p": torch.zeros(len(x), len(x))}, r"output\['p'\] is \(4, 4\)"),
    "dtype": (lambda x: x.double() if len(x) == 4 else x, r"output is .*float64 and .*float32"),
    "length": (lambda x: {"rows": list(x)}, r"output\['rows'\] is list\(4\) and list\(3\)"),
    "keys": (lambda x: {len(x): x}, r"output is dict\[4\] and dict\[3\]"),
    "types": (lambda x: {"y": x if len(x) == 4 else None}, r"output\['y'\] is Tensor and NoneType"),
    "distribution": (lambda x: {"q": torch.distributions.Normal(x, 1.0)}, r"output\['q'\]"),
}


@pytest.mark.parametrize(("function", "name"), REFUSED.values(), ids=REFUSED)
def test_dp_outputs_that_cannot_be_merged_are_refused_by_name(function, name):
    with pytest.raises(ValueError, match=name):
        divide(Call(function), torch.randn(7, 4))


# replicas


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("samples", [7, 5, 3, 1])
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["float32", "float64"]
)
def test_dp_gradients_equal_single_device(samples, devices, dtype, rtol, schedule):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    oracle = copy.deepcopy(network)
    x = torch.randn(samples, 4, dtype=dtype)
    y = torch.randint(3, (samples,))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    losses = [
        cross_entropy(divide(network, inputs[0], devices=devices), y),
        cross_entropy(oracle(inputs[1]), y),
    ]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=rtol, atol=0)
    for one, other in [inputs, *zip(network.parameters(), oracle.parameters(), strict=True)]:
        largest = float(other.grad.abs().max())
        torch.testing.assert_close(one.grad, other.grad, rtol=rtol, atol=rtol * largest)


def test_dp_batchnorm_statistics_are_those_of_the_first_chunk(schedule):
    norm, oracle = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    x = torch.cat([torch.randn(3, 2), 100 + torch.randn(2, 2)])
    out = divide(norm, x)
    first = oracle(x[:3])
    torch.testing.assert_close(norm.state_dict(), oracle.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(out, torch.cat([first, nn.BatchNorm1d(2)(x[3:])]), rtol=0, atol=0)


def test_dp_attributes_set_in_forward_are_kept_from_the_first_replica_only(schedule):
    class Remembers(nn.Module):
        def forward(self, x):
            self.seen = x
            return x

    module = Remembers()
    divide(module, torch.arange(5.0))
    assert torch.equal(module.seen, torch.arange(3.0))


def test_dp_replicas_share_tied_modules_and_parameters():
    tied = nn.Linear(4, 4, bias=False)
    module = nn.Sequential(tied, nn.BatchNorm1d(4), tied)
    root, replica = dp.replicate(module, [CPU, CPU])
    assert root is module
    assert replica[0] is replica[2] is not tied
    assert replica[0].weight is tied.weight
    assert replica[1].running_mean is not module[1].running_mean
    assert replica.state_dict().keys() == module.state_dict().keys()


@pytest.mark.parametrize("kind", ["parameters", "broadcast"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: nn.LSTM(4, 3, batch_first=True), id="lstm"),
        pytest.param(
            lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), id="attention"
        ),
        pytest.param(
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), id="weight-norm"
        ),
        pytest.param(lambda: nn.ParameterList([torch.ones(4)]), id="parameter-list"),
        pytest.param(
            lambda: torch.compile(nn.Linear(4, 3), backend="eager", fullgraph=True), id="compiled"
        ),
    ],
)
def test_dp_replica_computes_with_its_own_tensors(make, kind):
    """The copies that GPUs get by broadcast are no leaves; their gradients reach the originals."""
    torch.manual_seed(0)
    module = make()
    call = (lambda m: m[0] * 2) if isinstance(module, nn.ParameterList) else (lambda m: m(x))
    x = torch.randn(2, 5, 4)
    tensors = [*module.parameters(), *module.buffers()]
    own = {t: t * 1 if kind == "broadcast" else t for t in tensors}
    state = {name: value.clone() for name, value in module.state_dict().items()}
    replica = dp._copy_modules(module, own, {})

    def first(out):
        return out[0] if isinstance(out, tuple) else out

    gradients = []
    for m in (module, replica):
        out = first(call(m))
        gradients.append(torch.autograd.grad(out.square().sum(), list(module.parameters())))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    doubled = dp._copy_modules(module, {t: t * 2 for t in tensors}, {})
    assert not torch.equal(first(call(doubled)), first(call(module)))
    torch.testing.assert_close(dict(module.state_dict()), state, rtol=0, atol=0)


def test_dp_compiled_network_trains_as_on_a_single_device(schedule):
    compiles = []

    def backend(graph, _):
        compiles.append(graph)
        return graph.forward

    def cls():
        return Module(
            torch.compile(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), backend=backend)
        )

    torch._dynamo.reset()
    data = loader(28, 7)
    one = fit(cls, data=data, max_epochs=3)
    assert len(compiles) <= 4  # not once per step: 12 steps, 2 replicas
    assert_same_training(one, single(cls, data=data, max_epochs=3))


# modes and threads


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "fp16"])
def test_dp_replicas_run_in_the_modes_of_the_caller(mode, autocast, schedule):
    seen = []

    def record(x):
        enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), enabled, dtype))
        return x

    modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad}
    with (
        modes.get(mode, torch.inference_mode)(),
        torch.autocast("cpu", dtype=torch.float16, enabled=autocast),
    ):
        divide(Call(record), torch.zeros(6, 1), devices=3)
    assert seen == [(mode == "grad", mode == "inference", autocast, torch.float16)] * 3


def test_dp_current_replica_is_known_in_hooks_of_submodules(schedule):
    seen = {}
    module = Module()
    module.network[0].register_forward_hook(
        lambda _, args, out: seen.update({current_replica(): (len(args[0]), len(out))})
    )
    whole = []
    module.register_forward_hook(lambda *call: whole.append((current_replica(), len(call[2]))))
    trainer(devices=3).predict(module, DataLoader(torch.zeros(7, 4), batch_size=7))
    assert seen == {0: (3, 3), 1: (3, 3), 2: (1, 1)}
    assert whole == [(None, 7)]
    assert current_replica() is None


def test_dp_replicas_see_the_context_variables_of_the_caller(schedule):
    variable = ContextVar("variable", default="default")
    variable.set("caller")
    assert divide(Call(lambda _: variable.get()), torch.zeros(3, 1), devices=3) == "caller"


def test_dp_threads_compute_at_the_same_time(threads):
    barrier = threading.Barrier(3, timeout=10)
    names = []

    def meet(x):
        barrier.wait()
        names.append(threading.current_thread().name)
        return x

    divide(Call(meet), torch.zeros(3, 1), devices=3)
    assert len(set(names)) == 3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_dp_exception_names_its_replica_and_leaves_no_thread(failing, schedule):
    class Fails(Module):
        def forward(self, x):
            if current_replica() == failing:
                raise KeyError("broken")
            return super().forward(x)

    before = set(threading.enumerate())
    plain = Fails.forward
    with pytest.raises(KeyError, match="broken") as error:
        fit(Fails, devices=3)
    assert f"replica {failing} of 3" in "".join(error.value.__notes__)
    assert set(threading.enumerate()) == before
    assert Fails.forward is plain
    assert current_replica() is None


def test_dp_leaves_no_thread_and_no_patch_after_teardown(schedule):
    before = set(threading.enumerate())
    during = []

    class Watches(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            during.append(len(set(threading.enumerate()) - before))
            assert "forward" not in vars(self)
            return loss

    fit(Watches, devices=3)
    assert set(during) == {2 if schedule == "threads" else 0}
    assert set(threading.enumerate()) == before
    assert "forward" not in vars(Watches)


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_dp_with_dropout_has_one_result_per_seed(devices):
    def cls():
        return Module(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 2)))

    one, other = fit(cls, devices=devices), fit(cls, devices=devices)
    assert_same_training(one, other, rtol=0, atol=0)


# training


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
