"""The standard library as text to continue, and as definitions whose package is to be told."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from lockstep.data import Splits
from lockstep.errors import UsageError
from lockstep.workloads.text.pieces import Continuations, Pieces, by_length
from lockstep.workloads.text.sources import (
    SPLITS,
    log_read,
    modules_of,
    split_of,
    starts_of,
    top_level_modules,
)

WORD = re.compile(rb"[A-Za-z]+|[0-9]+|[^\w\s]")


def stdlib_bytes(
    train_bytes: int, val_bytes: int, test_bytes: int, context: int, cut: str = "windows"
) -> Splits:
    """The bytes of the top-level modules, to be continued byte by byte.

    Each file is in one split, and each split ends after its number of bytes. ``cut`` says what a
    sample is: ``windows`` of ``context`` bytes, or ``definitions``, which are functions, methods
    and classes of unequal length, the longer ones cut after every ``context`` bytes.
    """
    sizes = dict(zip(SPLITS, (train_bytes, val_bytes, test_bytes), strict=True))
    for split, size in sizes.items():
        if size < 2:
            raise UsageError(f"data.datasets.{split}_bytes must be 2 or more; got {size}. Use 1e5.")
    if context < 1:
        raise UsageError(f"data.datasets.context must be 1 or greater; got {context}. Use 128.")
    if cut not in ("windows", "definitions"):
        raise UsageError(f"data.datasets.cut must be windows or definitions; got {cut}.")
    read = read_modules(sizes)
    texts = {
        split: b"".join(content for path, content in read if split_of(path) == split)
        for split in SPLITS
    }
    said = ", ".join(f"{split} {len(text):,}" for split, text in texts.items())
    log_read("stdlib_bytes", read, f"{said} bytes of {len(read)} modules")
    cuts = {split: cuts_of(text, context, cut) for split, text in texts.items()}
    train, val, test = (continuations(texts[x], cuts[x], x != "train") for x in SPLITS)
    return Splits(train, val, test)


def read_modules(sizes: dict[str, int]) -> list[tuple[Path, bytes]]:
    """The top-level modules in order of their names, up to each split's number of bytes."""
    left, read = dict(sizes), []
    for path in top_level_modules():
        content = path.read_bytes()[: left[split_of(path)]]
        left[split_of(path)] -= len(content)
        if content:
            read.append((path, content))
    missing = [split for split in SPLITS if left[split] == sizes[split]]
    if missing:
        raise UsageError(
            f"Every split must hold a file; this Python's standard library has none for {missing}. "
            "Use a Python that is installed with all of its sources."
        )
    return read


def cuts_of(text: bytes, context: int, cut: str) -> Tensor:
    """Where the pieces of a text begin, and where the last one ends: its last byte, which has no
    byte after it to predict."""
    last = len(text) - 1
    starts = starts_of(text) if cut == "definitions" else []
    bounds = sorted({0, *(start for start in starts if start < last), last})
    places = (range(a, b, context) for a, b in pairwise(bounds))
    return torch.tensor([place for piece in places for place in piece] + [last])


def continuations(text: bytes, cuts: Tensor, ordered: bool) -> Continuations:
    """Evaluation is in order of length: each sample counts once, and the order does not matter."""
    starts, lengths = cuts[:-1], cuts.diff()
    order = by_length(starts, lengths) if ordered else torch.arange(len(starts))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Continuations(tokens, starts[order], lengths[order])


def stdlib_topics(topics: Sequence[str], buckets: int, min_words: int, max_words: int) -> Splits:
    """Definitions of packages of the standard library, labelled with their package's place.

    A sample is the first ``max_words`` words and signs of a function, method or class, as numbers
    from 1 to ``buckets - 1`` (a hash; 0 is padding); those under ``min_words`` are left out. Each
    file is in one split.
    """
    if not 1 <= min_words <= max_words or buckets < 2:
        raise UsageError(
            "data.datasets must have 1 <= min_words <= max_words and buckets >= 2; got "
            f"{min_words}, {max_words} and {buckets}. Use 8, 256 and 8192."
        )
    read: list[tuple[Path, bytes]] = []
    samples: dict[str, list[tuple[int, list[int]]]] = {split: [] for split in SPLITS}
    for label, topic in enumerate(topics):
        for path, split in dealt(modules_of(topic)):
            read.append((path, path.read_bytes()))
            found = definitions(read[-1][1], buckets, max_words)
            samples[split] += [(label, words) for words in found if len(words) >= min_words]
    _log_topics(topics, samples, read)
    train, val, test = (pieces(samples[split], split != "train") for split in SPLITS)
    return Splits(train, val, test)


def dealt(paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """Files with their splits: the largest to training, the next to validation, and so on, so that
    each split holds some of every package."""
    ordered = sorted(paths, key=lambda path: (-path.stat().st_size, path))
    order = ("train", "val", "train", "test", "train")
    return [(path, order[i % len(order)]) for i, path in enumerate(ordered)]


def definitions(content: bytes, buckets: int, max_words: int) -> list[list[int]]:
    bounds = [*starts_of(content), len(content)]
    texts = (content[a:b] for a, b in pairwise(bounds))
    return [[bucket(word, buckets) for word in WORD.findall(x)[:max_words]] for x in texts]


def bucket(word: bytes, buckets: int) -> int:
    """Not Python's ``hash``, which differs from process to process."""
    return 1 + zlib.crc32(word.lower()) % (buckets - 1)


def pieces(samples: Sequence[tuple[int, list[int]]], ordered: bool) -> Pieces:
    lengths = torch.tensor([len(words) for _, words in samples])
    starts = lengths.cumsum(0) - lengths
    labels = torch.tensor([label for label, _ in samples])
    tokens = torch.tensor([word for _, words in samples for word in words], dtype=torch.int32)
    order = by_length(starts, lengths) if ordered else torch.arange(len(samples))
    return Pieces(tokens, starts[order], lengths[order], labels[order])


def _log_topics(
    topics: Sequence[str],
    samples: dict[str, list[tuple[int, list[int]]]],
    read: list[tuple[Path, bytes]],
) -> None:
    """How many there are, and how good the constant answer is; every split must have samples."""
    for split, found in samples.items():
        if not found:
            raise UsageError(
                f"The {split} split must hold a definition; the files of {', '.join(topics)} that "
                "belong to it hold none. Name more in data.datasets.topics."
            )
    most = Counter(label for label, _ in samples["train"]).most_common(1)[0][0]
    share = sum(label == most for label, _ in samples["test"]) / len(samples["test"])
    said = ", ".join(f"{split} {len(found):,}" for split, found in samples.items())
    words = f"{said} definitions; always {topics[most]} is right for {share:.3f} of the test"
    log_read("stdlib_topics", read, words)
