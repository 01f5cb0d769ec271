"""dp splits inputs and merges outputs as one device would have them."""

from collections import OrderedDict, defaultdict

import pytest
import torch
from dividing import CPU, WARNINGS, Call, Pair, Sample, divide
from torch import Tensor, nn

from lockstep.strategies import scatter_gather

pytestmark = pytest.mark.filterwarnings(*WARNINGS)


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


@pytest.mark.parametrize("samples", [7, 5, 3, 2, 1])
def test_dp_nested_outputs_equal_single_device(samples, schedule):
    def outputs(x):
        deep = {"pair": Pair(x * 2, [x.sum(1), None]), "sample": Sample(x + 1, "name")}
        return x, deep, (x.repeat_interleave(3, 0), 3, 0.5, "text")

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
