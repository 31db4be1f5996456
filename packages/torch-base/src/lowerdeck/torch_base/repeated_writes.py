"""Writes through tensors that show their memory more than once, or leave some of it out.

Eager writes the one element that all repetitions show. torch's functionalisation computes a value
for each repetition and adds their changes up. So such a write is made to one of the repetitions;
functionalisation is right with that. These are the operators that eager allows there (others want
a clone first) and that ``torch.export`` records.

A write through windows (``unfold``) torch undoes by adding them up in a tensor of zeros: what no
window shows is zero afterwards, without a word. Slices are undone as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from lowerdeck.torch_base._torch_private import expression_of
from lowerdeck.torch_base.arguments import arguments_of
from lowerdeck.torch_base.graphs import add_call, graphs_of
from lowerdeck.torch_base.memory import MemoryUse

_ATEN = torch.ops.aten


class RepeatedMemoryError(ValueError):
    """A write in place whose result depends on the order in which one element is written."""


def repeated_dims(own: object) -> list[int]:
    """Return the dimensions along which a tensor shows the same elements again, the last first.

    Args:
        own: A node with a tensor; anything else has none.
    """
    held = own.meta.get("val") if isinstance(own, Node) else None
    if not isinstance(held, torch.Tensor):
        return []
    dims = [
        dim
        for dim, (size, stride) in enumerate(zip(held.shape, held.stride(), strict=True))
        if isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size < 2)
    ]
    return dims[::-1]


def write_once(node: Node) -> None:
    """Write once what an expanded tensor repeats, in place.

    Args:
        node: A call of an operator of ``ONCE`` on a tensor with ``repeated_dims``.

    Raises:
        RepeatedMemoryError: It may write several values to one element.
    """
    own: Any = node.args[0]
    dims = repeated_dims(own)
    target, args = ONCE[node.target](node, dims)
    one = own
    for dim in dims:
        one = add_call(node, _ATEN.select.int, (one, dim, 0))
    node.replace_all_uses_with(own)
    node.target, node.args, node.kwargs = target, (one, *args), {}
    node.meta["val"] = one.meta["val"]


Once = tuple[Any, tuple[Any, ...]]


def _fill(node: Node, _: list[int]) -> Once:
    return node.target, node.args[1:]


def _masked_fill(node: Node, dims: list[int]) -> Once:
    own, mask, value = node.args
    return node.target, (_any(node, mask, own.meta["val"].dim(), dims), value)  # type: ignore[union-attr]


def _any(node: Node, mask: Any, rank: int, dims: list[int]) -> Node:
    """Return a mask of what any of the repetitions would write; masks align at the last dim."""
    for dim in dims:
        held = mask.meta["val"]
        at = dim - (rank - held.dim())
        if at < 0:
            continue
        if isinstance(held.shape[at], int) and held.shape[at] == 1:
            mask = add_call(node, _ATEN.select.int, (mask, at, 0))
        else:
            mask = add_call(node, _ATEN.any.dim, (mask, at))
    return mask  # type: ignore[no-any-return]


def _index_fill(node: Node, dims: list[int]) -> Once:
    own, dim, index, value = node.args
    at = int(dim) % own.meta["val"].dim()  # type: ignore[arg-type, union-attr]
    if at in dims:
        _check_any(node, index)
        scalar = isinstance(value, (bool, int, float))
        return (_ATEN.fill_.Scalar if scalar else _ATEN.fill_.Tensor), (value,)
    return node.target, (at - sum(other < at for other in dims), index, value)


def _index_put(node: Node, dims: list[int]) -> Once:
    own, indices, values, *rest = node.args
    given: Any = indices
    held = values.meta["val"]  # type: ignore[union-attr]
    if any(rest) or node.kwargs.get("accumulate") or held.dim():
        raise _refused(node)
    if len(given) == 1 and given[0].meta["val"].dtype is torch.bool:
        rank, mask = own.meta["val"].dim(), given[0]  # type: ignore[union-attr]
        for _ in range(rank - mask.meta["val"].dim()):
            mask = add_call(node, _ATEN.unsqueeze.default, (mask, -1))
        return _ATEN.masked_fill_.Tensor, (_any(node, mask, rank, dims), values)
    if any(index is not None and index.meta["val"].dtype is torch.bool for index in given):
        raise _refused(node)
    for index in given:
        if index is not None:
            _check_any(node, index)
    left = [index for dim, index in enumerate(given) if dim not in dims]
    if any(index is not None for index in left):
        return node.target, (left, values)
    return _ATEN.fill_.Tensor, (values,)


def _check_any(node: Node, index: Any) -> None:
    """Refuse an index of which it is not known that it names anything."""
    if not all(isinstance(size, int) and size for size in index.meta["val"].shape):
        raise _refused(node)


def _refused(node: Node) -> RepeatedMemoryError:
    return RepeatedMemoryError(
        f"{node.name!r} ({node.target}) writes through a tensor that shows its memory more than "
        "once (it was expanded), and may write several values to one element: clone the tensor "
        "before the write"
    )


ONCE: Mapping[Any, Callable[[Node, list[int]], Once]] = {
    _ATEN.zero_.default: _fill,
    _ATEN.fill_.Scalar: _fill,
    _ATEN.fill_.Tensor: _fill,
    _ATEN.masked_fill_.Scalar: _masked_fill,
    _ATEN.masked_fill_.Tensor: _masked_fill,
    _ATEN.index_fill_.int_Scalar: _index_fill,
    _ATEN.index_fill_.int_Tensor: _index_fill,
    _ATEN.index_put_.default: _index_put,
}
"""What each operator's call becomes: the operator and its arguments past the tensor written."""


def leaves_gaps(node: Node) -> bool:
    """Return whether a node is a call of ``unfold`` that may leave elements out.

    Windows that overlap are no matter: torch refuses to write through them.

    Args:
        node: Any node.
    """
    if node.target is not _ATEN.unfold.default:
        return False
    given = arguments_of(node)
    size, step = given["size"], given["step"]
    if not isinstance(size, int) or not isinstance(step, int):
        # One that is a symbol may be smaller than the other.
        return True
    value = given["self"].meta["val"]
    if step < size or not value.dim():
        return False
    return step > size or bool(expression_of((value.shape[given["dimension"]] - size) % step) != 0)


def written_windows(graph_module: GraphModule) -> Iterator[Node]:
    """Yield the calls that leave elements out of memory which something may write.

    Args:
        graph_module: Its own graph is looked at, and those that its nodes are given, of which
            others may write what they return.
    """
    for gm in graphs_of(graph_module):
        found = [node for node in gm.graph.nodes if leaves_gaps(node)]
        if found and gm is graph_module:
            memory = MemoryUse(gm.graph, gm)
            found = [node for node in found if memory.writers(node)]
        yield from found


def say_windows(node: Node) -> None:
    """Let windows be what slices leave of windows that leave nothing out, where that can be.

    Args:
        node: A call that leaves elements out. It stays as it is where a size is not known, and
            where fewer stand after the last window than between two.
    """
    given = arguments_of(node)
    whole, size, step = given["self"], given["size"], given["step"]
    shape = whole.meta["val"].shape
    dim = given["dimension"] % len(shape)
    length = shape[dim]
    if not all(isinstance(number, int) for number in (length, size, step)):
        return
    count = (length - size) // step + 1
    width = size if count == 1 else step
    if count * width > length:
        return
    shown = whole
    if count * width < length:
        shown = add_call(node, _ATEN.slice.Tensor, (whole, dim, 0, count * width))
    if width == size:
        node.args, node.kwargs = (shown, dim, size, size), {}
        return
    shown = add_call(node, _ATEN.unfold.default, (shown, dim, width, width))
    node.target, node.args, node.kwargs = _ATEN.slice.Tensor, (shown, len(shape), 0, size), {}
