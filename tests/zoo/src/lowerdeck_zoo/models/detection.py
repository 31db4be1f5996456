"""Segmentation, detection, and what is done with their outputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everyone knows)
from torch import nn

from lowerdeck_zoo.program import Of, Program, drawn, normal


class LRASPP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Conv2d(3, 6, 3, 2, 1), nn.Conv2d(6, 8, 3, 2, 1)
        self.gate, self.body = nn.Conv2d(8, 8, 1, bias=False), nn.Conv2d(8, 8, 1)
        self.low_head, self.high_head = nn.Conv2d(6, 3, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = F.hardswish(self.low(x))
        high = self.high(low)
        gated = F.relu(self.body(high)) * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(high, 1)))
        gated = F.interpolate(gated, size=low.shape[2:], mode="bilinear", align_corners=False)
        return self.low_head(low) + self.high_head(gated)


class RetinaNet(nn.Module):
    """A pyramid of features with heads that share their weights, and boxes decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)])
        self.side = nn.ModuleList([nn.Conv2d(8, 8, 1), nn.Conv2d(16, 8, 1)])
        self.scores, self.boxes = nn.Conv2d(8, 6, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low = F.relu(self.stages[0](image))
        high = F.relu(self.stages[1](low))
        top = self.side[1](high)
        levels = [self.side[0](low) + F.interpolate(top, scale_factor=2.0), top]
        scores, boxes = [], []
        for stride, level in zip((2, 4), levels, strict=True):
            found = self.scores(level).unflatten(1, (2, 3)).permute(0, 3, 4, 1, 2)
            scores.append(found.flatten(1, 3).sigmoid())
            moves = self.boxes(level).unflatten(1, (2, 4)).permute(0, 3, 4, 1, 2).flatten(1, 3)
            rows, columns = (torch.arange(n) * stride for n in level.shape[2:])
            centre = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).float()
            centre = centre.flatten(0, 1).repeat_interleave(2, 0)
            middle = centre + moves[..., :2] * stride
            half = torch.exp(moves[..., 2:].clamp(max=4.0)) * stride / 2
            boxes.append(torch.cat([middle - half, middle + half], -1))
        best, kinds = torch.cat(scores, 1).max(-1)
        order = best.topk(5, 1)[1]
        chosen = torch.cat(boxes, 1).gather(1, order.unsqueeze(-1).expand(-1, -1, 4))
        return chosen, kinds.gather(1, order)


def _overlaps(boxes: torch.Tensor) -> torch.Tensor:
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    return shared / (area[:, None] + area[None] - shared)


def _suppress(boxes: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Non-maximum suppression with a loop over the boxes, and the survivors picked out."""
    order = torch.argsort(scores, descending=True, stable=True)
    boxes = boxes[order]
    hits = _overlaps(boxes) > 0.4
    keep = torch.ones(boxes.shape[0], dtype=torch.bool)
    for i in range(boxes.shape[0] - 1):
        later = torch.arange(boxes.shape[0]) > i
        keep = keep & ~(hits[i] & later & keep[i])
    return boxes[keep], order[torch.nonzero(keep).squeeze(1)]


def _boxes():
    corners = torch.rand(12, 2) * 6
    return torch.cat([corners, corners + 1 + torch.rand(12, 2) * 3], -1), torch.rand(12)


def _warp(image: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """A spatial transformer: turns an image."""
    c, s = angle.cos(), angle.sin()
    zero = torch.zeros_like(c)
    turn = torch.stack([torch.stack([c, -s, zero], -1), torch.stack([s, c, zero], -1)], 1)
    grid = F.affine_grid(turn, image.shape, align_corners=False)
    return F.grid_sample(image, grid, align_corners=False, padding_mode="border")


class Hourglass(nn.Module):
    """Pools with places, and unpools to them; heat maps to points."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 2, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        small, places = F.max_pool2d(x, 2, return_indices=True)
        y = self.head(F.max_unpool2d(F.relu(self.inner(small)), places, 2) + x)
        peaks = y.flatten(2).argmax(-1)
        points = torch.stack([peaks % y.shape[3], peaks // y.shape[3]], -1)
        weights = y.flatten(2).softmax(-1).view_as(y)
        soft = (weights.sum(2) * torch.arange(y.shape[3])).sum(-1)
        return points, soft


PROGRAMS = (
    Program("lraspp", LRASPP, normal(1, 3, 32, 32)),
    Program("retinanet", RetinaNet, normal(1, 3, 16, 16), tags="shared-weights"),
    Program("suppress_boxes", lambda: Of(_suppress), drawn(_boxes), tags="dynamic"),
    Program(
        "spatial_transformer",
        lambda: Of(_warp),
        drawn(lambda: (torch.randn(2, 3, 7, 7), torch.rand(2))),
    ),
    Program("hourglass", Hourglass, normal(1, 3, 8, 8)),
)
