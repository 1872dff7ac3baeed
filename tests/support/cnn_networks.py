# SPDX-License-Identifier: Apache-2.0
"""Four networks of the literature, as plain modules of torch.

Their default sizes are the published ones; ``width`` makes narrow ones of the same
structure.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

__all__ = ["Bottleneck", "ResNet50", "UNet3d", "cosmoflow", "meshnet"]


# -- ResNet-50 (He et al. 2016), in the structure and the names of torchvision ---------


class Bottleneck(nn.Module):
    """A residual block of three convolutions; the stride is in the second one."""

    def __init__(self, inputs: int, planes: int, stride: int, downsample: Any) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, 4 * planes, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Any) -> Any:
        """Return the block's output."""
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet50(nn.Module):
    """The network of 25,557,032 parameters for a width of 64 and 1,000 classes."""

    def __init__(self, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.inputs = width
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._blocks(width, 3, 1)
        self.layer2 = self._blocks(2 * width, 4, 2)
        self.layer3 = self._blocks(4 * width, 6, 2)
        self.layer4 = self._blocks(8 * width, 3, 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(32 * width, classes)

    def _blocks(self, planes: int, count: int, stride: int) -> nn.Sequential:
        downsample = nn.Sequential(
            nn.Conv2d(self.inputs, 4 * planes, 1, stride, bias=False),
            nn.BatchNorm2d(4 * planes),
        )
        blocks = [Bottleneck(self.inputs, planes, stride, downsample)]
        self.inputs = 4 * planes
        blocks += [Bottleneck(self.inputs, planes, 1, None) for _ in range(count - 1)]
        return nn.Sequential(*blocks)

    def forward(self, x: Any) -> Any:
        """Return a number for each class."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


# -- 3-d U-Net (Cicek et al. 2016) -----------------------------------------------------


def _pair(inputs: int, middle: int, outputs: int, padding: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(inputs, middle, 3, padding=padding),
        nn.BatchNorm3d(middle),
        nn.ReLU(inplace=True),
        nn.Conv3d(middle, outputs, 3, padding=padding),
        nn.BatchNorm3d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet3d(nn.Module):
    """The network of 19,069,955 parameters for a width of 32, its norms not counted.

    Convolutions are padded by zeros here. The paper's are not, and it crops what it
    joins; parameters are the same.
    """

    def __init__(self, width: int = 32, inputs: int = 3, classes: int = 3) -> None:
        super().__init__()
        n = width
        self.pool = nn.MaxPool3d(2, 2)
        self.down1 = _pair(inputs, n, 2 * n, 1)
        self.down2 = _pair(2 * n, 2 * n, 4 * n, 1)
        self.down3 = _pair(4 * n, 4 * n, 8 * n, 1)
        self.bottom = _pair(8 * n, 8 * n, 16 * n, 1)
        self.up3 = nn.ConvTranspose3d(16 * n, 16 * n, 2, 2, bias=False)
        self.join3 = _pair(24 * n, 8 * n, 8 * n, 1)
        self.up2 = nn.ConvTranspose3d(8 * n, 8 * n, 2, 2, bias=False)
        self.join2 = _pair(12 * n, 4 * n, 4 * n, 1)
        self.up1 = nn.ConvTranspose3d(4 * n, 4 * n, 2, 2, bias=False)
        self.join1 = _pair(6 * n, 2 * n, 2 * n, 1)
        self.last = nn.Conv3d(2 * n, classes, 1)

    def forward(self, x: Any) -> Any:
        """Return a number for each class at each voxel."""
        one = self.down1(x)
        two = self.down2(self.pool(one))
        three = self.down3(self.pool(two))
        x = self.up3(self.bottom(self.pool(three)))
        x = self.join3(torch.cat([three, x], dim=1))
        x = self.join2(torch.cat([two, self.up2(x)], dim=1))
        return self.last(self.join1(torch.cat([one, self.up1(x)], dim=1)))


# -- CosmoFlow, in the form of MLPerf HPC (Farrell et al. 2021) ------------------------


def cosmoflow(
    width: int = 32, side: int = 128, inputs: int = 4, dropout: float = 0.5
) -> nn.Sequential:
    """Return the network of 8,907,556 parameters for the default sizes."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = inputs
    for number in range(1, 6):
        made = width * 2 ** (number - 1)
        layers[f"conv{number}"] = nn.Conv3d(channels, made, 3, padding="same")
        layers[f"act{number}"] = nn.LeakyReLU(0.3)
        layers[f"pool{number}"] = nn.MaxPool3d(2)
        channels, side = made, side // 2
    layers["flat"] = nn.Flatten()
    features = channels * side**3
    for number, made in enumerate((128, 64), 1):
        layers[f"dense{number}"] = nn.Linear(features, made)
        layers[f"dense_act{number}"] = nn.LeakyReLU(0.3)
        layers[f"dropout{number}"] = nn.Dropout(dropout)
        features = made
    layers["last"] = nn.Linear(features, 4)
    layers["last_act"] = nn.Tanh()
    return nn.Sequential(layers)


# -- MeshNet (Fedorov et al. 2017) -----------------------------------------------------


def meshnet(
    width: int = 5, classes: int = 3, norm: bool = False, dropout: float = 0.1
) -> nn.Sequential:
    """Return the network of dilated convolutions with a volume in and one out.

    Brainchop's model of 5,598 parameters for a width of 5, three classes and no
    normalization, which was folded into the convolutions.
    """
    layers: list[nn.Module] = []
    channels = 1
    for dilation in (1, 1, 2, 4, 8, 16, 8, 4, 1):
        layers.append(
            nn.Conv3d(channels, width, 3, padding=dilation, dilation=dilation)
        )
        if norm:
            layers.append(nn.BatchNorm3d(width))
        layers += [nn.ReLU(), nn.Dropout3d(dropout)]
        channels = width
    return nn.Sequential(*layers, nn.Conv3d(width, classes, 1))
