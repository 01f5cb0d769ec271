"""A network as one file that needs neither this code nor its config, and the proof that it agrees.

The graph is torch's, of `torch.export`; ONNX is made from it.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves

from lockstep.errors import UsageError, one_line

ANSWERS_DIFFER_BY = 1e-5
"""At most, of the largest number of an answer, or of 1 where that is smaller."""

Inputs = dict[str, Tensor]
Answer = Callable[[Inputs], list[Tensor]]


def inputs_of(network: nn.Module, predict: Callable[[], object]) -> Inputs:
    """What ``network`` is given, by the names of its ``forward``, while ``predict`` runs.

    So the module says what its network takes, not the shape of a batch: rankings are made from the
    users alone. Raises `UsageError` where that is not one call with tensors.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    handle = network.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    try:
        predict()
    finally:
        handle.remove()
    bound = inspect.signature(network.forward)
    positional = all(item.kind is item.POSITIONAL_OR_KEYWORD for item in bound.parameters.values())
    if len(calls) != 1 or not positional:
        raise UsageError(
            "export needs a network that predict_step calls once, by arguments that have names; "
            f"{type(network).__name__}{bound} was called {len(calls)} times. Wrap it in a module "
            "whose forward does all of it."
        )
    given = bound.bind(*calls[0][0], **calls[0][1]).arguments
    if wrong := [name for name, value in given.items() if not isinstance(value, Tensor)]:
        raise UsageError(
            f"export needs tensors as the network's inputs; {', '.join(wrong)} of "
            f"{type(network).__name__} is none. Make it an argument of the constructor."
        )
    # A graph for one sample would be for one only; and what inference mode made is not traced.
    return {name: _two_or_more(value).cpu().clone() for name, value in given.items()}


def _two_or_more(rows: Tensor) -> Tensor:
    return rows if len(rows) > 1 else rows.repeat_interleave(2, 0)


def export(network: nn.Module, inputs: Inputs, output: Path) -> float:
    """Write ``network`` to ``output``, which appears once what was written answers the same.

    The number of samples is free; so are, in inputs of integers, other sizes that the network does
    not fix, such as the length of a text. Returns the largest difference seen, measured as
    `ANSWERS_DIFFER_BY` is. Raises `UsageError` for a network that has no such graph, and for a file
    that answers otherwise.
    """
    network = network.cpu().eval()
    output.parent.mkdir(parents=True, exist_ok=True)
    # torch wants the suffix, so that it cannot be the end of the name.
    temporary = output.with_name(f"{output.stem}.{os.getpid()}.tmp{output.suffix}")
    write = {".onnx": _write_onnx, ".pt2": _write_torch}[output.suffix]
    try:
        with torch.no_grad():
            program = _graph_of(network, inputs)
            answer = write(program, temporary)
            differences = [
                _difference(tree_leaves(network(*trial.values())), answer(trial))
                for trial in _trials(program, inputs)
            ]
        _refuse_other_answers(max(differences), output)
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)
    return max(differences)


def _graph_of(network: nn.Module, inputs: Inputs) -> ExportedProgram:
    sizes = {
        name: {0: Dim.DYNAMIC, **dict.fromkeys(_may_vary(value), Dim.AUTO)}
        for name, value in inputs.items()
    }
    try:
        return torch.export.export(network, tuple(inputs.values()), dynamic_shapes=sizes)
    except Exception as error:  # torch has no one exception for what cannot be traced
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"export needs a network that torch.export can trace, for any number of samples; "
            f"{type(network).__name__} is none: {reason} Write what depends on the "
            "values of its inputs as tensor operations."
        ) from error


def _may_vary(value: Tensor) -> range:
    """Dimensions beside the samples: of tokens their number, of an image or of features none."""
    return range(1, 1 if value.is_floating_point() else value.ndim)


def _write_torch(program: ExportedProgram, path: Path) -> Answer:
    torch.export.save(program, path)
    loaded = torch.export.load(path).module()
    return lambda inputs: tree_leaves(loaded(*inputs.values()))


def _write_onnx(program: ExportedProgram, path: Path) -> Answer:
    import onnxruntime

    for name in ("onnxscript", "onnx_ir"):  # each step of theirs, at the level of our own lines
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        torch.onnx.export(program, (), path, external_data=False, verbose=False)
    except torch.onnx.errors.OnnxExporterError as error:
        raise UsageError(
            f"output=<name>.onnx needs a network whose operations ONNX has: {one_line(error)[:500]}"
            " Use output=<name>.pt2."
        ) from error
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def answer(inputs: Inputs) -> list[Tensor]:
        arrays = {name: value.numpy() for name, value in inputs.items()}
        return [torch.from_numpy(array) for array in session.run(None, arrays)]

    return answer


def _trials(program: ExportedProgram, inputs: Inputs) -> Iterator[Inputs]:
    """All samples, one, and three times as many; where other sizes are free, also half of them."""
    samples = len(next(iter(inputs.values())))
    for rows in (torch.arange(samples), torch.arange(1), torch.arange(3 * samples) % samples):
        yield {name: value[rows] for name, value in inputs.items()}
    free = _free_sizes(program)
    if any(free.values()):
        shorter = dict(inputs)
        for name, dimensions in free.items():
            for dimension in dimensions:
                half = -(-inputs[name].shape[dimension] // 2)
                shorter[name] = shorter[name].narrow(dimension, 0, half)
        yield shorter


def _free_sizes(program: ExportedProgram) -> dict[str, list[int]]:
    """Of each input the dimensions, but that of the samples, that the graph leaves open."""
    nodes = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
    return {
        name: [
            dimension
            for dimension, size in enumerate(nodes[name].shape)
            if dimension and not isinstance(size, int)
        ]
        for name in program.graph_signature.user_inputs
        if isinstance(name, str)
    }


def _difference(expected: list[Tensor], got: list[Tensor]) -> float:
    """The largest of all numbers; infinite where a shape or a NaN differs."""
    if [leaf.shape for leaf in expected] != [leaf.shape for leaf in got]:
        return float("inf")
    largest = 0.0
    for one, other in zip(expected, got, strict=True):
        if not torch.equal(one.isnan(), other.isnan()):
            return float("inf")
        one, other = one.double().nan_to_num(), other.double().nan_to_num()
        scale = max(1.0, float(one.abs().max()))
        largest = max(largest, float((one - other).abs().max()) / scale)
    return largest


def _refuse_other_answers(difference: float, output: Path) -> None:
    if difference > ANSWERS_DIFFER_BY:
        raise UsageError(
            f"An exported network must answer as its own does, to {ANSWERS_DIFFER_BY:.0e} of the "
            f"largest number; that in {output.name} differs by {difference:.1e}. It is not kept. "
            f"Use output=<name>{'.pt2' if output.suffix == '.onnx' else '.onnx'}."
        )
