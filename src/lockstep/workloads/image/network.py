"""Networks for small images: a CNN of our own, and torchvision's, cut to size."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lockstep.errors import UsageError
from lockstep.workloads.image.images import vision

# B batch, C channels, H height, W width, K classes


class CNN(nn.Module):
    """Three 3 x 3 convolutions, the mean over what they see, a linear layer: BCHW to BK.

    GroupNorm, not BatchNorm: its statistics are those of a sample, so that the result does not
    depend on how a batch is split.
    """

    def __init__(self, channels: int, classes: int, width: int = 32, groups: int = 8) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        if width % groups:
            below = max(width // groups, 1) * groups
            raise UsageError(
                "model.network.width must be divisible by model.network.groups; got "
                f"{width} and {groups}. Use {below} or {below + groups}."
            )
        layers: list[nn.Module] = []
        for before, after in zip([channels, *widths], widths, strict=False):
            layers += [
                nn.Conv2d(before, after, 3, padding=1),
                nn.GroupNorm(groups, after),
                nn.ReLU(),
            ]
        layers.insert(6, nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes)

    @override
    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images).mean((-2, -1)))
        return logits


def resnet18(
    channels: int,
    classes: int,
    stride: int = 1,
    max_pool: bool = False,
    norm: str = "batch",
    groups: int = 32,
) -> nn.Module:
    """torchvision's ResNet-18 whose first convolution is 3 x 3, as He et al. (2015) have it for
    CIFAR-10: BCHW to BK.

    ``norm`` is ``batch``, or ``group``, whose statistics do not depend on how a batch is split.
    """
    if norm not in ("batch", "group"):
        raise UsageError(f"model.network.norm must be batch or group; got {norm!r}.")
    layer = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, groups)
    network = _torchvision().resnet18(num_classes=classes, norm_layer=layer)
    network.conv1 = nn.Conv2d(channels, 64, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    if not max_pool:
        network.maxpool = nn.Identity()
    return _channels_last(network)


def vgg11(channels: int, classes: int, hidden: int = 128) -> nn.Module:
    """torchvision's VGG-11 for 32 x 32 pixels, which its five poolings make 1 x 1: B C 32 32 to BK.

    Its classifier for ImageNet, 120 of 129 million weights, is replaced by a layer of ``hidden``
    units; without dropout, whose draws would differ from rank to rank.
    """
    models = _torchvision()
    features = models.vgg.make_layers(models.vgg.cfgs["A"])
    features[0] = nn.Conv2d(channels, 64, 3, padding=1)
    for layer in features:
        if isinstance(layer, nn.Conv2d):  # as torchvision's VGG initializes its own
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]  # there is one
    with torch.device("meta"):  # the classifier for ImageNet takes no memory
        network = models.VGG(features, init_weights=False)
    network.avgpool = nn.Identity()
    network.classifier = nn.Sequential(
        nn.Linear(512, hidden), nn.ReLU(), nn.Linear(hidden, classes)
    )
    return _channels_last(network)


def _channels_last(network: Any) -> nn.Module:
    """Three times as fast on a CPU, measured with VGG-11; convolutions follow their weights."""
    moved: nn.Module = network.to(memory_format=torch.channels_last)
    return moved


def _torchvision() -> Any:
    with vision("This network"):
        from torchvision import models
    return models
