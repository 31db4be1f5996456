"""Indexing with constant indices, and flips."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import fx
from torch.types import IntLikeType as Dim

from lowerdeck.lowered_module import fold_node
from lowerdeck.torch_base import describe_node
from lowerdeck.xnnpack.emit import Call, Emission, Tracked, is_fixed, is_one, joined
from lowerdeck.xnnpack.errors import UnsupportedNodeError
from lowerdeck.xnnpack.operators.contract import Table, move, table

_MOST_PIECES = 64
"""Maximum number of slices of an index, which take a node each; the runtime has no gather."""
_FEW = 4
"""Maximum size that is reversed element by element."""
_MOST_INDICES = 1 << 16
"""Maximum number of indices evaluated to count their slices."""
Run = tuple[int, int, int]


def runs(indices: Sequence[int]) -> Iterator[Run]:
    """Split indices into runs (first index, count, step), with a step of 1, -1 or 0."""
    start = 0
    while start < len(indices):
        end, step = start + 1, 1
        if end < len(indices) and abs(indices[end] - indices[start]) <= 1:
            step = indices[end] - indices[start]
            while end < len(indices) and indices[end] - indices[end - 1] == step:
                end += 1
        yield indices[start], end - start, step
        start = end


def choice_refusal(shape: Sequence[Dim], indices: Sequence[int]) -> str | None:
    """Return why indices of a dimension cannot be selected, or None."""
    few = {1: 0.0, 0: _FEW, -1: _max_by_element(shape)}
    pieces = sum(count if count <= few[step] else 1 for _, count, step in runs(indices))
    if pieces > _MOST_PIECES:
        return f"it selects more than {_MOST_PIECES} pieces, each of which takes a node"
    return None


def _max_by_element(shape: Sequence[Dim]) -> float:
    """Return the largest size that is reversed element by element; larger ones use reshapes."""
    return _FEW if sum(not is_fixed(size) for size in shape) < 2 else math.inf


def chosen(emission: Emission, tracked: Tracked, axis: int, indices: Sequence[int]) -> Tracked:
    """Select indices of a dimension; consecutive ones take one slice.

    Args:
        axis: The dimension, of static size.
        indices: The selected indices, none negative.
    """
    layout, few = tracked.preferred, _max_by_element(tracked.shape)
    parts: list[Tracked] = []
    for start, count, step in runs(indices):
        if step == 1:
            parts.append(emission.sliced(tracked, axis, start, count))
        elif step == 0:
            parts += _copies(emission, emission.sliced(tracked, axis, start, 1), axis, count)
        elif count <= few:
            parts += [emission.sliced(tracked, axis, start - offset, 1) for offset in range(count)]
        else:
            piece = emission.sliced(tracked, axis, start - count + 1, count)
            parts.append(_reversed(emission, piece, axis))
    return joined(emission, parts, axis, layout)


def _copies(emission: Emission, part: Tracked, axis: int, count: int) -> list[Tracked]:
    """Return tensors whose concatenation repeats a dimension of size 1 ``count`` times."""
    if count <= _FEW:
        return [part] * count
    parts = [part] * (count % 2)
    size = 2
    while size <= count:
        part = joined(emission, [part] * 2, axis, part.preferred)
        parts += [part] * (count // size % 2)
        size *= 2
    return parts


def _reversed(emission: Emission, tracked: Tracked, axis: int) -> Tracked:
    """Return a tensor with a dimension of static size reversed."""
    shape = tracked.shape
    before, size, after = math.prod(shape[:axis]), int(shape[axis]), math.prod(shape[axis + 1 :])
    flat = (before, size, after)
    return emission.view(_reverse_rows(emission, emission.view(tracked, flat)), shape)


def _reverse_rows(emission: Emission, tracked: Tracked) -> Tracked:
    """Return a 3-D tensor with the second dimension reversed.

    Swap the halves, then the halves of all halves at once: the number of nodes is logarithmic in
    the size.
    """
    before, size, after = tracked.shape
    half, rest = divmod(int(size), 2)

    def piece(start: int, count: int) -> Tracked:
        return emission.sliced(tracked, 1, start, count)

    if size <= _FEW:
        return joined(emission, [piece(index, 1) for index in range(int(size))[::-1]], 1)
    if rest:
        turned = _reverse_rows(emission, piece(0, 2 * half))
        return joined(emission, [piece(2 * half, 1), turned], 1)
    halves = joined(emission, [piece(half, half), piece(0, half)], 1)
    turned = _reverse_rows(emission, emission.view(halves, (before * 2, half, after)))
    return emission.view(turned, (before, size, after))


def _choose(e: Emission, x: Tracked, call: Call) -> Tracked:
    axis = _chosen_axis(call)
    size = int(x.shape[axis])
    indices = [int(index) for index in e.constant(_indices(call))]
    if any(not -size <= index < size for index in indices):
        raise UnsupportedNodeError(
            f"{describe_node(call.node)} has indices out of range for dimension {axis} of size "
            f"{size}"
        )
    return chosen(e, x, axis, [index % size for index in indices])


def _indices(call: Call) -> fx.Node:
    """Return the node of the indices; a supported call has exactly one."""
    arguments = [call.args["index"]] if "index" in call.args else call.args["indices"]
    indices: fx.Node = next(argument for argument in arguments if argument is not None)
    return indices


def _chosen_axis(call: Call) -> int:
    if "index" in call.args:
        return call.axis()
    return next(axis for axis, argument in enumerate(call.args["indices"]) if argument is not None)


def _choose_refusal(call: Call) -> str | None:
    arguments = [call.args["index"]] if "index" in call.args else call.args["indices"]
    tensors = [argument for argument in arguments if argument is not None]
    if len(tensors) != 1 or not isinstance(tensors[0], fx.Node):
        return "it indexes several dimensions"
    value, shape = tensors[0].meta["val"], call.shape("self")
    if tensors[0].name not in call.constants:
        return "its indices are not constant"
    if value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
        return "its indices are not a one-dimensional integer tensor"
    size = shape[_chosen_axis(call)] if shape else None
    if not isinstance(size, int):
        return "it takes elements along a dynamic dimension"
    if value.shape[0] <= _MOST_PIECES:
        return None
    indices = _computed(tensors[0])
    if indices is None:
        return f"it selects more than {_MOST_PIECES} indices, which may take a node each"
    return choice_refusal(shape, [index % size for index in indices])


def _computed(node: fx.Node) -> list[int] | None:
    """Return indices computed from numbers only, or None if they read constants."""
    chain = [node]
    for link in chain:
        value = link.meta.get("val")
        if link.op != "call_function" or not isinstance(value, torch.Tensor):
            return None
        if len(chain) > _MOST_PIECES or value.numel() > _MOST_INDICES:
            return None
        chain += [source for source in link.all_input_nodes if source not in chain]
    results: dict[fx.Node, torch.Tensor] = {}
    for link in sorted(chain):
        results[link] = fold_node(link, results.__getitem__)
    return [int(index) for index in results[node]]


def _flip(e: Emission, x: Tracked, call: Call) -> Tracked:
    for axis in _flipped(call):
        x = chosen(e, x, axis, range(int(x.shape[axis]))[::-1])
    return x


def _flipped(call: Call) -> list[int]:
    """Return the flipped dimensions that have more than one index."""
    shape = call.shape("self")
    axes = [int(axis) % len(shape) for axis in call.args["dims"]] if shape else []
    return [axis for axis in axes if not is_one(shape[axis])]


def _flip_refusal(call: Call) -> str | None:
    shape = call.shape("self")
    sizes = [shape[axis] for axis in _flipped(call)]
    if not all(map(is_fixed, sizes)):
        return "it flips a symbolic size"
    refusals = (choice_refusal(shape, range(int(size))[::-1]) for size in sizes)
    return next(filter(None, refusals), None)


CHOOSING: Table = table(
    {
        "index_select index.Tensor": move(_choose, _choose_refusal),
        "flip": move(_flip, _flip_refusal),
    }
)
