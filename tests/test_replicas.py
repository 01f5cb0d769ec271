"""dp's replicas compute what the network does on one device; `threads` runs them as GPUs do."""

import copy
import threading
from contextvars import ContextVar

import pytest
import torch
from dividing import (
    CPU,
    WARNINGS,
    Call,
    Module,
    assert_same_training,
    divide,
    fit,
    loader,
    single,
    trainer,
)
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lockstep.strategies import replicas as dp
from lockstep.strategies.replicas import current_replica

pytestmark = pytest.mark.filterwarnings(*WARNINGS)


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
