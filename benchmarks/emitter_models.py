"""Models in plain torch that emission is measured on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from examples.mobilenet_v2 import MobileNetV2
from examples.resnet18 import ResNet18
from lowerdeck_zoo import Holding, program
from lowerdeck_zoo.models.language import GPT


class Recurrent(
    Holding, lstm=lambda: nn.LSTM(64, 64, 2, batch_first=True), head=lambda: nn.Linear(64, 10)
):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.lstm(x)
        return self.head(y[:, -1])


def _image() -> tuple[torch.Tensor, ...]:
    return (torch.randn(1, 3, 224, 224),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "ResNet-18 at 224": (ResNet18, _image),
    "GPT-2-like 4x256": (lambda: GPT(256, 4, 8, 1000), lambda: (torch.randint(0, 1000, (1, 64)),)),
    "LSTM 2x64": (Recurrent, lambda: (torch.randn(1, 32, 64),)),
    "DenseNet-121-like": (lambda: program("torchvision_densenet121").module(), _image),
    "MobileNet-V2-like": (MobileNetV2, _image),
}
