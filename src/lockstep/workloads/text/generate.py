"""``python -m lockstep.workloads.text.generate RUN_OR_CHECKPOINT``: continue a prompt."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from lockstep.config import Target
from lockstep.errors import UsageError
from lockstep.resume import config_of
from lockstep.trained import checkpoint_of, load_network
from lockstep.workloads.text.network import ByteTransformer
from lockstep.workloads.text.pieces import Continuations

START = b"\n"
"""What an empty prompt becomes: the beginning of a line."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep.workloads.text.generate",
        description="Continue a prompt with the language model of a run.",
    )
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT", type=Path)
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--bytes", type=int, default=200, help="how many to add")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest byte")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        if options.bytes < 1 or not 0 <= options.temperature < float("inf"):
            raise UsageError(
                "--bytes must be 1 or greater and --temperature 0 or greater; got "
                f"{options.bytes} and {options.temperature}. Use 200 and 0.8."
            )
        network, datasets = load_model(options.source)
        prompt = options.prompt.encode("utf-8", "surrogateescape")
        for remark in remarks(prompt, network.context, seen_in_training(datasets)):
            print(remark, file=sys.stderr)
        added = generate(network, prompt, options.bytes, options.temperature, options.seed)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print((prompt + added).decode("utf-8", "replace"))
    return 0


@torch.inference_mode()
def generate(
    network: ByteTransformer, prompt: bytes, count: int, temperature: float, seed: int
) -> bytes:
    """The ``count`` bytes after ``prompt``, which follow from the seed; greedy at temperature 0.

    The network sees the last ``network.context`` bytes of what there is.
    """
    draws = torch.Generator().manual_seed(seed)
    text = list(prompt or START)
    begun = len(text)
    for _ in range(count):
        scores: Tensor = network(torch.tensor([text[-network.context :]]))[0, -1].double()
        if temperature == 0:
            text.append(int(scores.argmax()))
        else:
            chances = torch.softmax((scores - scores.max()) / temperature, 0)
            text.append(int(torch.multinomial(chances, 1, generator=draws)))
    return bytes(text[begun:])


def remarks(prompt: bytes, context: int, seen: frozenset[int]) -> list[str]:
    """What a person should know about a prompt before reading its continuation."""
    found = []
    if not prompt:
        found.append("The prompt is empty: starting at the beginning of a line.")
    if len(prompt) > context:
        found.append(f"The prompt has {len(prompt)} bytes: the model sees the last {context}.")
    unseen = sorted(set(prompt[-context:]) - seen)
    if unseen:
        found.append(
            f"The model has never seen {bytes(unseen)!r} in training, and what it makes of that is "
            "chance."
        )
    return found


def load_model(source: Path) -> tuple[ByteTransformer, Target]:
    """The network of a run, from its best checkpoint or the one that is named, and what it calls
    for its data."""
    checkpoint, path = checkpoint_of(source), config_of(source)
    stored = OmegaConf.load(path)
    assert isinstance(stored, DictConfig)
    # Not all of it: where it writes is known only while Hydra runs.
    target = OmegaConf.to_container(stored.model.get("network") or OmegaConf.create())
    datasets = OmegaConf.to_container(stored.data.datasets)
    assert isinstance(target, dict)
    assert isinstance(datasets, dict)
    network = build_network({str(key): value for key, value in target.items()}, path)
    load_network(network, checkpoint)
    return network.eval(), {str(key): value for key, value in datasets.items()}


def build_network(target: Target, path: Path) -> ByteTransformer:
    from lockstep.build import make  # a room below this one

    network = make(target) if target else None
    if not isinstance(network, ByteTransformer):
        raise UsageError(
            f"The run must have trained a {ByteTransformer.__name__}; model.network in {path} is a "
            f"{type(network).__name__}. Name a run of experiment=text/language_model."
        )
    return network


def seen_in_training(datasets: Target) -> frozenset[int]:
    """The bytes that the training text holds, read again as the run read it."""
    from lockstep.build import make

    train = make(datasets).train
    if not isinstance(train, Continuations):
        return frozenset(range(256))  # data of a user's own: nothing is known of it
    return frozenset(torch.bincount(train.tokens).nonzero().flatten().tolist())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
