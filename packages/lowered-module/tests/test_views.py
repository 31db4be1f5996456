"""Views of dynamic sizes that move past the operations between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import Graph

from lowerdeck.lowered_module import to_backend
from lowerdeck.lowered_module.program.copies import rewritten
from lowerdeck.lowered_module.program.equal_calls import merge_calls
from lowerdeck.lowered_module.program.late_views import merge_late
from lowerdeck.lowered_module.program.plain_sizes import _rewritten_size
from lowerdeck.lowered_module.testing import TaggingPartitioner
from lowerdeck.torch_base import copy_graph
from lowerdeck_zoo import Of, exported

MOVED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mask": lambda x, mask: x + mask,
    "twice": lambda x, mask: (x + mask) * mask[0],
    "numbers": lambda x, _: (x - 2) * 3,
    "reversed": lambda x, mask: mask - x,
    "of an image": lambda x, _: x + torch.ones(x.shape[0], 1, 1, 1, 1),
}
KEPT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "read as images": lambda x, mask: (x + mask).sum(1, keepdim=True) + x,
    "not elementwise": lambda x, mask: torch.softmax(x + mask, 1),
}


@pytest.mark.parametrize("name", [*MOVED, *KEPT])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_view_that_is_undone_moves_behind_what_broadcasts(name: str, is_known: bool) -> None:
    function = {**MOVED, **KEPT}[name]

    def split(x: Tensor, image: Tensor, mask: Tensor) -> Tensor:
        batch = image.shape[0] if is_known else -1
        split = torch.relu(x).view(batch, mask.shape[1], 2, 4, 4)
        return torch.sigmoid(function(split, mask).view(-1, 2, 4, 4))

    def inputs(batch: int, windows: int) -> Any:
        x, image = torch.randn(batch * windows, 2, 4, 4), torch.ones(batch)
        return x, image, torch.randn(1, windows, 1, 4, 4)

    dims = (({0: Dim.AUTO}, {0: Dim.AUTO}, {1: Dim.AUTO}),)
    program = exported(Of(split), *inputs(2, 3), dynamic_shapes=dims).run_decompositions({})
    late = rewritten(program, merge_late)
    views = late.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)
    assert all(len(view.meta["val"].shape) < 5 for view in views) is (name in MOVED and is_known)
    for sizes in ((2, 3), (5, 4), (2, 7)):
        x = inputs(*sizes)
        torch.testing.assert_close(late.module()(*x), Of(split)(*x))


def regrouped(x: Tensor, y: Tensor) -> Tensor:
    b, w = x.shape[:2]
    merged = x.reshape(b * w * 8, 4, 2).relu()
    return (merged.view(b, w, 2, 4, 8) + torch.arange(4.0)[:, None]).view(b * w * 8, 4, 2)


def heads(x: Tensor, y: Tensor) -> Tensor:
    b, w = x.shape[:2]
    merged = x.reshape(b * w, 8, 8).relu()
    return (merged.view(b, w, 8, 2, 4) * y[0, 0, 0, :2, :1]).view(b * w, 8, 8)


def without_ones(x: Tensor, y: Tensor) -> Tensor:
    b, w = x.shape[:2]
    return (x.reshape(b * w, 1, 64).relu().view(b, w, 64) + torch.ones(64)).view(b * w, 1, 64)


def unsqueezed(x: Tensor, y: Tensor) -> Tensor:
    return (x.flatten(2).relu().unsqueeze(1) + torch.ones(64)).squeeze(1)


def integers(x: Tensor, y: Tensor) -> Tensor:
    b, w, n = x.shape[:3]
    merged = (x.reshape(b * w, n, 32) * 3).to(torch.int64)
    return ((merged.view(b, w, n, 32) / 2) * y[0].reshape(w, n, 32)).view(b * w, n, 32)


@pytest.mark.parametrize("function", [regrouped, heads, without_ones, unsqueezed, integers])
def test_what_does_not_fit_a_split_stays(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    sizes = dict.fromkeys(range(3 if function is integers else 2), Dim.AUTO)
    dims = ((sizes, sizes),)
    x, y = torch.randn(3, 4, 2, 4, 8), torch.randn(3, 4, 2, 4, 8)
    program = exported(Of(function), x, y, dynamic_shapes=dims).run_decompositions({})
    late = rewritten(program, merge_late)
    torch.testing.assert_close(late.module()(x, y), function(x, y))
    for view in late.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        assert view.meta["val"].dtype == view.args[0].meta["val"].dtype


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: x.permute(0, 2, 1, 3, 4).transpose(1, 2) + 1, 0),
        (lambda x: x.permute(0, 4, 1, 2, 3).flatten(2).transpose(1, 2), 0),
        (lambda x: x + torch.arange(6) * torch.arange(6), 0),
        # As in XLNet, where another layer repeats the first permutation.
        (lambda x: (x.mT.mT.relu(), x.mT.exp()), 1),
        (lambda x: x.permute(0, 4, 1, 3, 2).flatten(2).transpose(1, 2), 2),
        (lambda x: x.permute(0, 2, 1, 3, 4).flatten(1, 2).transpose(0, 1), 2),
    ],
)
def test_permutations_cancel_out(function: Callable[[Tensor], Tensor], left: int) -> None:
    x = torch.randn(2, 3, 4, 5, 6)
    dims = (({0: Dim.AUTO, 1: Dim.AUTO},),)
    program = exported(Of(function), x, dynamic_shapes=dims).run_decompositions({})
    merged = rewritten(program, merge_calls)
    nodes = [str(node.target) for node in merged.graph.nodes]
    assert sum("permute" in name or "transpose" in name for name in nodes) == left
    x = torch.randn(3, 5, 4, 5, 6)
    torch.testing.assert_close(merged.module()(x), function(x))


def test_rewrites_of_dynamic_sizes_share_copies_and_rewritten_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a Swin, which pads an image to whole windows."""

    def windows(x: Tensor) -> Tensor:
        padded = nn.functional.pad(x, (0, 0, 0, (4 - x.shape[1] % 4) % 4))
        split = padded.view(x.shape[0], padded.shape[1] // 4, 4, 8)
        return split.relu() + torch.arange(4)[:, None]

    dims = (({0: Dim.AUTO, 1: Dim.AUTO},),)
    program = exported(Of(windows), torch.randn(3, 10, 8), dynamic_shapes=dims)
    copies = 0

    def counting(graph: Graph) -> Any:
        nonlocal copies
        copies += 1
        return copy_graph(graph)

    monkeypatch.setattr("lowerdeck.torch_base.graphs.copy_graph", counting)
    partitioner = TaggingPartitioner(lambda node: "a" if "relu" in node.name else None)
    to_backend(program, partitioner)
    assert copies <= 5, copies
    misses = _rewritten_size.cache_info().misses
    to_backend(program, partitioner)
    assert misses == _rewritten_size.cache_info().misses > 0
