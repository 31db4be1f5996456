"""Ordinary models give eager's values, state and hierarchy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from unflatten_comparison import check  # type: ignore[import-not-found]

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module


class Mlp(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


class Cnn(Model):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.bn(self.conv(x)).relu().mean((2, 3)))


class Shared(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.again = self.fc
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embedding(x)
        for _ in range(3):
            x = self.fc(x).tanh()
        return self.head(self.again(x))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("model", "args"),
    [
        (Mlp, (torch.ones(2, 4),)),
        (Cnn, (torch.arange(96.0).reshape(2, 3, 4, 4),)),
        (Shared, (torch.tensor([1, 4]),)),
    ],
)
def test_values_state_and_names_are_eagers(
    model: type[nn.Module], args: tuple[torch.Tensor, ...], train: bool
) -> None:
    check(model().train(train), args)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_transformer_block() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    check(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (torch.randn(2, 3, 8),))


def test_repeated_calls_of_equal_form_share_one_module_without_extra_keys() -> None:
    for module in check(Shared(), (torch.tensor([1, 4]),)).values():
        assert module.fc is module.again
        assert not any("@" in name for name, _ in module.named_modules())
