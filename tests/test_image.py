"""Images: augmentation, networks, and the promise of the core for them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Launch, on, quick_and_slow
from left import history, network_weights
from pictures import global_images

from lockstep.config import Config, TrainerConfig
from lockstep.errors import UsageError
from lockstep.placement import place
from lockstep.workloads.image.augment import Drawn, ShiftAndFlip
from lockstep.workloads.image.data import digits
from lockstep.workloads.image.images import Images
from lockstep.workloads.image.network import CNN, resnet18, vgg11

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
