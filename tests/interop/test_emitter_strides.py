"""What torch's strides allow runs in a program that has none, with dynamic shapes as well."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from lowerdeck.emitter import emit
from lowerdeck.serializer import KernelCall
from lowerdeck_zoo import assert_close, official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

attend = nn.functional.scaled_dot_product_attention


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def check(
    function: Any, args: tuple[Any, ...], folder: Path, shapes: Any = None, later: Any = ()
) -> Any:
    """Compare with eager from bytes and from a path; ``later`` are inputs of other shapes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(Of(function), args, dynamic_shapes=shapes)
        emitted = emit(exported)
    emitted.save(folder / "model.pte")
    calls = [args, *later]
    expected = [pytree.tree_leaves(function(*call)) for call in calls]
    for source in (emitted.to_bytes(), folder / "model.pte"):
        outcome = official.run(source, [official.Call(call) for call in calls])
        assert isinstance(outcome, official.Ran), outcome
        for got, wanted in zip(outcome.outputs, expected, strict=True):
            assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    return emitted


def heads(x: torch.Tensor, count: int = 2) -> torch.Tensor:
    batch, length, features = x.shape
    return x.view(batch, length, count, features // count).transpose(1, 2)


def joined(x: torch.Tensor) -> torch.Tensor:
    batch, count, length, features = x.shape
    return x.transpose(1, 2).view(batch, length, count * features)


SEEN = torch.tensor([[True, False, False], [True, True, False], [True, True, True]])
ATTENTION: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: joined(attend(heads(x), heads(x * 2), heads(x + 1))),
    "causal": lambda x: joined(attend(heads(x), heads(x * 2), heads(x), is_causal=True)),
    "copied first": lambda x: joined(attend(heads(x), heads(x), heads(x)).contiguous()),
    "scaled": lambda x: joined(attend(heads(x), heads(x), heads(x), scale=0.3)),
    "grouped": lambda x: joined(
        attend(heads(x, 4), heads(x[..., :4] + 0, 2), heads(x[..., 4:] + 0, 2), enable_gqa=True)
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_whose_result_is_viewed_as_torch_lays_it(name: str, tmp_path: Path) -> None:
    if name == "copied first":
        function = lambda x: attend(heads(x), heads(x), heads(x)).reshape(2, 3, 8)  # noqa: E731
    else:
        function = ATTENTION[name]
    check(function, (torch.randn(2, 3, 8),), tmp_path)


def test_attention_with_a_mask_whose_result_is_viewed(tmp_path: Path) -> None:
    for mask in (SEEN, torch.randn(3, 3), SEEN.expand(2, 1, 3, 3).clone()):
        check(
            lambda x, m: joined(attend(heads(x), heads(x), heads(x), attn_mask=m)),
            (torch.randn(2, 3, 8), mask),
            tmp_path,
        )


def test_attention_over_a_length_that_varies(tmp_path: Path) -> None:
    later = [(torch.randn(2, n, 8),) for n in (2, 9)]
    shapes = ({1: Dim("length", min=2, max=9)},)
    check(ATTENTION["causal"], (torch.randn(2, 3, 8),), tmp_path, (shapes,), later)


def test_the_layout_of_attention_costs_no_kernel(tmp_path: Path) -> None:
    def count(function: Any) -> int:
        emitted = check(function, (torch.randn(2, 3, 8),), tmp_path)
        steps = emitted.program.execution_plan[0].chains[0].instructions
        return sum(isinstance(step.instr_args, KernelCall) for step in steps)

    plain = count(lambda x: attend(heads(x), heads(x), heads(x)))
    assert count(ATTENTION["plain"]) <= plain + 3


NONZERO: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "t": lambda x: x.nonzero().t(),
    "T": lambda x: x.nonzero().T + 1,
    "transpose": lambda x: x.nonzero().transpose(0, 1),
    "permute": lambda x: x.nonzero().permute(1, 0),
    "unsqueezed": lambda x: x.nonzero().unsqueeze(0).permute(1, 0, 2),
    "view": lambda x: x.nonzero().t().reshape(-1),
}


@pytest.mark.parametrize("name", NONZERO)
def test_a_turned_tensor_whose_size_depends_on_data(name: str, tmp_path: Path) -> None:
    x = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    later = [(torch.zeros(2, 3).index_fill(0, torch.tensor(1), 2.0),), (torch.ones(2, 3),)]
    later.append((torch.tensor([[0.0, 0.0, 5.0], [0.0, 0.0, 0.0]]),))
    check(NONZERO[name], (x,), tmp_path, None, later)


LISTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "split": lambda x: x.split(2, 1),
    "split with a rest": lambda x: x.split(4, 1),
    "split along a negative dimension": lambda x: x.split(5, -1),
    "split_copy": lambda x: torch.split_copy(x, 2, 1),
    "split_with_sizes": lambda x: x.split([2, 4], 1),
    "split_with_sizes_copy": lambda x: torch.split_with_sizes_copy(x, [2, 4], 1),
    "unsafe_split": lambda x: torch.unsafe_split(x, 2, 1),
    "unsafe_split_with_sizes": lambda x: torch.unsafe_split_with_sizes(x, [2, 4], 1),
    "chunk": lambda x: x.chunk(3, 1),
    "tensor_split": lambda x: torch.tensor_split(x, 4, 1),
    "unbind": lambda x: x.unbind(1),
    "unbind_copy": lambda x: torch.unbind_copy(x, 1),
    "hsplit": lambda x: x.hsplit(3),
    "var_mean": lambda x: torch.var_mean(x, 1),
    "topk": lambda x: x.topk(2, 1),
    "max": lambda x: x.max(1),
    "sort": lambda x: x.sort(1),
    "layer norm": lambda x: torch.native_layer_norm(x, [6], None, None, 1e-5),
    "meshgrid": lambda x: torch.meshgrid(x[:, 0], x[0], indexing="ij"),
}


@pytest.mark.parametrize("name", LISTS)
def test_several_results_of_which_a_size_varies(name: str, tmp_path: Path) -> None:
    rows = Dim("rows", min=2, max=9)
    later = [(torch.randn(n, 6),) for n in (2, 9)]
    check(LISTS[name], (torch.randn(4, 6),), tmp_path, (({0: rows},),), later)


def test_parts_of_a_dimension_that_varies(tmp_path: Path) -> None:
    rows = Dim("rows", min=1, max=6)
    shapes = (({0: 2 * rows},),)
    later = [(torch.randn(2 * n, 3),) for n in (1, 6)]
    check(lambda x: x.split(x.shape[0] // 2), (torch.randn(8, 3),), tmp_path, shapes, later)


def test_a_view_of_a_copy_of_a_turned_tensor(tmp_path: Path) -> None:
    function = lambda x: (x.transpose(1, 2) * 2).contiguous().view(2, 12)  # noqa: E731
    check(function, (torch.randn(2, 3, 4),), tmp_path)


@pytest.mark.parametrize("size", [(5, 7), (20, 3), (9, 8), (1, 1)])
@pytest.mark.parametrize("corners", [False, True])
def test_bicubic_images_that_are_averaged(size: Any, corners: bool, tmp_path: Path) -> None:
    resize = nn.functional.interpolate
    check(
        lambda x: resize(x, size=size, mode="bicubic", antialias=True, align_corners=corners),
        (torch.randn(1, 2, 9, 8),),
        tmp_path,
    )
    if not corners:
        check(
            lambda x: resize(x, scale_factor=(0.4, 1.7), mode="bicubic", antialias=True),
            (torch.randn(1, 2, 9, 8),),
            tmp_path,
        )
