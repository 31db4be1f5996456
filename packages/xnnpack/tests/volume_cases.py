"""Convolutions and pools over depth, height and width."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from case_making import Case, case, module  # type: ignore[import-not-found]
from torch import nn
from torch.export import Dim

VOLUME = (2, 4, 5, 7, 6)


def volumes() -> Iterator[Case]:
    """Yield the cases."""
    for name, layer in {
        "plain": nn.Conv3d(4, 6, 3),
        "padded": nn.Conv3d(4, 6, 3, padding=(1, 2, 0)),
        "stepped": nn.Conv3d(4, 6, 3, stride=(2, 1, 2), padding=1),
        "stepped_far": nn.Conv3d(4, 6, (2, 1, 1), stride=(3, 2, 1)),
        "dilated": nn.Conv3d(4, 6, (2, 3, 2), dilation=(3, 2, 1), padding=(1, 0, 0)),
        "point": nn.Conv3d(4, 6, 1, bias=False),
        "of_depth": nn.Conv3d(4, 6, (3, 1, 1), padding=(1, 0, 0)),
        "of_images": nn.Conv3d(4, 6, (1, 3, 3), padding=(0, 1, 1)),
        "deep": nn.Conv3d(4, 2, (7, 2, 2), padding=(3, 0, 0)),
        "grouped": nn.Conv3d(4, 6, 3, groups=2, padding=1),
        "depthwise": nn.Conv3d(4, 4, 3, groups=4, padding=1),
        "depthwise_wide": nn.Conv3d(4, 8, (3, 2, 2), groups=4, stride=2),
        "max": nn.MaxPool3d(2),
        "max_padded": nn.MaxPool3d(3, 2, 1),
        "max_of_depth": nn.MaxPool3d((3, 1, 1), 1),
        "max_of_images": nn.MaxPool3d((1, 2, 2)),
        "max_dilated": nn.MaxPool3d((2, 3, 2), 1, dilation=(3, 2, 1)),
        "max_ceil": nn.MaxPool3d((3, 2, 4), 2, 1, ceil_mode=True),
        "avg": nn.AvgPool3d(2),
        "avg_uncounted": nn.AvgPool3d(3, 2, 1, count_include_pad=False),
        "avg_of_depth": nn.AvgPool3d((5, 1, 1)),
        "adaptive": nn.AdaptiveAvgPool3d(1),
        "norm": nn.Sequential(
            nn.Conv3d(4, 6, 3, padding=1), nn.BatchNorm3d(6), nn.ReLU(), nn.MaxPool3d(2)
        ),
        "norm_apart": nn.Sequential(nn.MaxPool3d(2), nn.BatchNorm3d(4)),
        "net": nn.Sequential(
            *(nn.Conv3d(4, 6, 3, padding=1), nn.ReLU6(), nn.MaxPool3d(2), nn.Conv3d(6, 3, 2)),
            *(nn.Flatten(), nn.Linear(12, 5)),
        ),
    }.items():
        for part in layer.modules():
            if isinstance(part, nn.BatchNorm3d):
                nn.init.normal_(part.get_buffer("running_mean"))
                nn.init.uniform_(part.get_buffer("running_var"), 0.3, 2.0)
        yield module(f"volume_{name}", layer, VOLUME)
    batch = Dim("batch", min=1, max=9)
    yield module(
        "volume_dynamic",
        nn.Sequential(nn.Conv3d(4, 3, 3, stride=2, padding=1), nn.MaxPool3d(2)),
        VOLUME,
        dynamic=(({0: batch},),),
        others=((torch.randn(5, *VOLUME[1:]),), (torch.randn(1, *VOLUME[1:]),)),
    )
    yield case(
        "volume_between",
        lambda x, m: (m(x.relu()) + 1).permute(0, 2, 1, 3, 4).sigmoid(),
        VOLUME,
        parts=(nn.Conv3d(4, 4, 3, padding=1),),
    )
