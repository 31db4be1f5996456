"""Models with channels-last tensors, views and indexing."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everyone knows)
from torch import nn

from lowerdeck_zoo.program import Of, Program, drawn, normal, together


class ChannelsLast(nn.Module):
    """Asks for channels-last inside, and returns contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(memory_format=torch.channels_last)
        y = torch.relu(self.norm(self.first(y)))
        return self.second(y).contiguous()


class ChannelsLastWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2)).to(
            memory_format=torch.channels_last
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).mean((2, 3))


def _channels_last_inputs():
    return [(torch.randn(1, 3, 8, 8).to(memory_format=torch.channels_last),) for _ in range(3)]


def _views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.view(2, 12).t().reshape(4, 6)
    return (
        y.transpose(0, 1).contiguous()[1:3],
        x.permute(2, 0, 1)[::2],
        x.unsqueeze(0).squeeze(),
        x.expand(2, 2, 3, 4).sum(0),
        x.flip(1),
        x.roll(1, 2),
        x.unfold(2, 2, 1),
        torch.stack(x.unbind(0), -1),
    )


def _indices(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        x[i],
        x[:, i],
        x[i, :, i % 4],
        x.gather(0, i[:, None, None].expand(-1, 3, 4)),
        x.index_select(0, i),
        torch.zeros_like(x).index_put((i,), x[: i.shape[0]]),
        torch.zeros(3, 3, 4).scatter_add(0, i[:, None, None].expand(-1, 3, 4), x[: i.shape[0]]),
    )


def _split(x: torch.Tensor) -> torch.Tensor:
    a, b, c = x.split([1, 2, 3], dim=1)
    parts = torch.cat([c, a, b], 1).chunk(3, 1)
    return torch.cat([parts[2], parts[0]], 1) + torch.stack([parts[1]] * 2, 1).flatten(1)


_OF_IMAGES = (
    torch.relu,
    lambda x: F.max_pool2d(x, 2),
    lambda x: F.avg_pool2d(x, 2),
    lambda x: torch.cat([x, x * 2], 1),
    lambda x: F.interpolate(x, scale_factor=2),
    lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    lambda x: x + x.sigmoid(),
    lambda x: x * torch.arange(4.0).view(1, 4, 1, 1),
    lambda x: x.mean((2, 3)),
    lambda x: x.softmax(1),
    lambda x: torch.where(x > 0, x, -x),
    lambda x: F.pad(x, (1, 1)),
    lambda x: x + torch.arange(6.0),
    lambda x: x.permute(0, 2, 3, 1).contiguous(),
    lambda x: x.flatten(1),
    lambda x: x[:, 1:3],
    lambda x: x.contiguous() * 2,
)


def _image() -> tuple[torch.Tensor]:
    return (torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last),)


PROGRAMS = (
    Program("channels_last_inside", ChannelsLast, normal(1, 3, 8, 8)),
    Program("channels_last_input", ChannelsLast, _channels_last_inputs),
    Program("channels_last_weights", ChannelsLastWeights, normal(2, 3, 9, 9)),
    Program("views", lambda: Of(_views), normal(2, 3, 4)),
    Program(
        "indices",
        lambda: Of(_indices),
        drawn(lambda: (torch.randn(3, 3, 4), torch.tensor([2, 0]))),
    ),
    Program("split_and_join", lambda: Of(_split), normal(2, 6)),
    Program("operators_of_channels_last", together(*_OF_IMAGES), drawn(_image)),
)
