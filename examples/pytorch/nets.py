# SPDX-License-Identifier: Apache-2.0
"""Networks that the benchmarks train."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x))) + x


class Bottleneck(nn.Module):
    """He et al., Deep Residual Learning for Image Recognition, figure 5, with the stride in the middle."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if stride == 1 and inputs == outputs else nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet50(classes=1000):
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(count):
            layers.append(Bottleneck(inputs, width, stride if i == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def conv():
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *[Block(32) for _ in range(14)],
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def mlp():
    layers = [nn.Linear(64, 192), nn.GELU()]
    for _ in range(14):
        layers += [nn.Linear(192, 192), nn.LayerNorm(192), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(192, 10))


#: Parts that checkpointing computes again.
CHECKPOINTED = (Block, Bottleneck, nn.LayerNorm)


def make(net, batch=None, size=None):
    """A network with inputs and labels for one step."""
    if net == "mlp":
        batch = batch or 4096
        return mlp(), torch.randn(batch, 64), torch.randint(0, 10, (batch,))
    if net == "resnet50":
        batch, size = batch or 4, size or 128
        return resnet50(), torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))
    batch, size = batch or 16, size or 64
    return conv(), torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))
