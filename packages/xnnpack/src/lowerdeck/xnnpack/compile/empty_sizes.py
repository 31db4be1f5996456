"""Calls with a dynamic size that is 0 at run time, which ``Dim("batch")`` allows.

The runtime computes most operators on empty tensors. The exceptions are data here, found by trying
all operators. Calls that would crash the process are not delegated. Calls that would raise an
error are delegated, because ``Dim("batch")`` rarely means a batch of 0, and the summary lists
them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.types import IntLikeType as Dim

from lowerdeck.torch_base import arguments_of, size_range
from lowerdeck.xnnpack.emit import Call, fake, is_one, named, shape_of
from lowerdeck.xnnpack.operators.arithmetic import ARITHMETIC
from lowerdeck.xnnpack.operators.convolution import CONVOLUTIONS
from lowerdeck.xnnpack.operators.elementwise import CLAMPS, ELEMENTWISE
from lowerdeck.xnnpack.operators.quantization import QUANTIZATION
from lowerdeck.xnnpack.operators.shapes import SHAPES

HEADING = "fails on nothing"
_aten = torch.ops.aten
Sizes = Callable[[Call], Sequence[Dim]]
Ranges = Mapping[Any, Any]


def _of(name: str, *axes: int) -> Sizes:
    return lambda call: [call.shape(name)[axis] for axis in axes]


def _product(call: Call) -> Sequence[Dim]:
    left, right = (shape_of(call.args[name]) for name in _factors(call))
    # A matrix that broadcasts against zero batches is an error as well.
    batches = [] if len(left) == len(right) else shape_of(call.node)[:-2]
    return [*left[-2:], right[-1], *batches]


def _factors(call: Call) -> tuple[str, str]:
    return "self", "other" if "other" in call.args else "mat2"


def _along(call: Call) -> Sequence[Dim]:
    return [call.shape("self")[call.axis()]]


def _maximum(call: Call) -> Sequence[Dim]:
    return call.shape("self")[1:]


_STOPS: Mapping[object, Sizes] = {
    _aten.linear.default: _of("weight", 1),
    _aten.addmm.default: _of("mat2", 0),
}
"""The sizes of which a 0 divides by zero, and ends the process."""
_POOLS = named(
    "max_pool2d max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d "
    "max_pool3d max_pool3d_with_indices avg_pool3d adaptive_avg_pool3d _adaptive_avg_pool3d"
)
_FAILS: Mapping[object, Sizes] = {
    _aten.linear.default: _of("weight", 0),
    _aten.addmm.default: _of("mat2", 1),
    **dict.fromkeys(named("mm bmm matmul"), _product),
    **dict.fromkeys(named("_softmax softmax.int"), _along),
    **dict.fromkeys(named("group_norm native_group_norm"), lambda call: call.shape("input")[2:]),
    _aten.scaled_dot_product_attention.default: lambda call: [
        call.shape("query")[-2],
        call.shape("key")[-2],
        call.shape("value")[-2],
    ],
    **dict.fromkeys(named("amax max.dim max amin min.dim min"), _maximum),
    **dict.fromkeys(
        [*_POOLS, *named("adaptive_avg_pool1d avg_pool1d max_pool1d")], _of("self", 1)
    ),
}
"""The sizes of which a 0 is an error (0x1)."""
_WINDOWS = frozenset({*CONVOLUTIONS, *_POOLS})
"""Operators that leave the height and width of no images unset: whatever was in memory."""
_AVERAGES = frozenset({_aten.mean.dim, _aten.upsample_bilinear2d.vec})
_RESHAPES = frozenset(op for op, entry in SHAPES.items() if entry is SHAPES[_aten.view.default])
_PASS_ON = frozenset({*ELEMENTWISE, *CLAMPS, *SHAPES}) - _RESHAPES


def fatal_size(node: Node, ranges: Ranges) -> str | None:
    """Return why a call must not be taken: with some size it would end or damage the process.

    Args:
        node: A call that XNNPACK would take otherwise.
    """
    size = _first_empty(node, _STOPS, ranges)
    if size is not None:
        return f"its size {size} may be 0, which ends the runtime's process"
    return None


def failing_sizes(nodes: Iterable[Node], ranges: Ranges) -> dict[str, str]:
    """Return what ends with an error of the runtime if a dynamic size is 0.

    Args:
        nodes: The calls that XNNPACK takes, in order.

    Returns:
        By the name of the first node that fails for one size: why, and how many others do.
    """
    delegated = dict.fromkeys(nodes)
    unset = unset_sizes(delegated, ranges)
    first: dict[str, str] = {}
    others: dict[str, int] = {}
    for node in delegated:
        size = _first_empty(node, _FAILS, ranges) or _met(node, unset)
        if size is None and node in unset and _leaves_unset(node, delegated):
            size = unset[node]
        if size is not None:
            others[size] = others.get(size, -1) + 1
            first.setdefault(size, node.name)
    return {name: _sentence(size, others[size]) for size, name in first.items()}


def _sentence(size: str, others: int) -> str:
    more = f", so do {others} more" if others else ""
    return (
        f"its size {size} may be 0, on which the runtime fails or ends{more}; "
        'say torch.export.Dim("...", min=1) if it never is'
    )


def _first_empty(node: Node, table: Mapping[object, Sizes], ranges: Ranges) -> str | None:
    sizes = table.get(node.target)
    if sizes is None:
        return None
    failure = sizes(Call(node, arguments_of(node), ()))
    return next((str(size) for size in failure if size_range(size, ranges)[0] == 0), None)


def unset_sizes(nodes: Iterable[Node], ranges: Ranges) -> dict[Node, str]:
    """Return the results whose height and width the runtime leaves unset for zero images.

    Returns:
        By node: the number of images. A reshape to fixed sizes ends it.
    """
    unset: dict[Node, str] = {}
    for node in nodes:
        shape = _shape(node)
        if node.target in _WINDOWS and shape and size_range(shape[0], ranges)[0] == 0:
            # One dimension is computed as an image of one row, reshaped back, which sets all.
            if len(shape) == 4 and not _is_global(node):
                unset[node] = str(shape[0])
        elif node.target not in _AVERAGES:
            source = next(
                (source_node for source_node in node.all_input_nodes if source_node in unset), None
            )
            if source is not None and len(shape) == 4 and not _sets(node, source):
                unset[node] = unset[source]
    return unset


def _leaves_unset(node: Node, delegated: Collection[Node]) -> bool:
    """Return whether a result leaves the delegate with sizes that no reshape could set."""
    # A reshape that the backend adds infers one symbolic size.
    several = sum(not isinstance(size, int) for size in _shape(node)) > 1
    return several and any(user not in delegated for user in node.users)


def _sets(node: Node, source: Node) -> bool:
    # A reshape to equal sizes is a no-op; one to several symbolic sizes infers nothing.
    before, after = (list(map(str, _shape(operand))) for operand in (source, node))
    symbols = sum(not isinstance(size, int) for size in _shape(node))
    return node.target in _RESHAPES and before != after and symbols <= 1


def _shape(node: Node) -> tuple[Dim, ...]:
    value = node.meta.get("val")
    tensor = value[0] if isinstance(value, (list, tuple)) and value else value
    return tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else ()


def _is_global(node: Node) -> bool:
    # The average over whole images has its sizes whether or not there are any.
    name = str(node.target)
    return "adaptive_avg" in name and all(map(is_one, _shape(node)[2:]))


def _met(node: Node, unset: Mapping[Node, str]) -> str | None:
    """Return the number of images where sizes that were not set meet others."""
    size = next((unset[source] for source in node.all_input_nodes if source in unset), None)
    if size is None or node.target in (_PASS_ON | _RESHAPES | _WINDOWS | _AVERAGES):
        return None
    if node.target in ARITHMETIC:
        others = [
            source
            for source in node.all_input_nodes
            if source not in unset and fake(source) is not None
        ]
        left_right = [source for source in node.args[:2] if isinstance(source, Node)]
        if len(left_right) == 1 or (others and all(map(is_one, _spatial(others[0])))):
            return None
    return None if node.target is operator.getitem or str(node.target) in QUANTIZATION else size


def _spatial(node: Node) -> Sequence[Dim]:
    return (1, 1, 1, *shape_of(node))[-2:]
