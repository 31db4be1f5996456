"""Indexing with constant indices, and flips."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from lowerdeck.lowered_module import fold_node
from lowerdeck.torch_base import describe_node
from lowerdeck.xnnpack.emit import Call, Emission, Tracked, is_fixed, is_one, joined
from lowerdeck.xnnpack.errors import UnsupportedNodeError
from lowerdeck.xnnpack.operators.contract import Table, move, table

_MOST_INDICES = 64
"""Maximum number of elements of an index, a slice each; the runtime has no gather."""
_MOST_PIECES = 256
"""Maximum number of slices of a flip, a padding or indices known while partitioning."""
_MOST_COMPUTED = 1 << 16
"""Maximum number of indices computed to count their slices."""


def runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Split indices into runs of consecutive ones: the first index, and their count."""
    start = 0
    for end in range(1, len(indices) + 1):
        if end == len(indices) or indices[end] != indices[end - 1] + 1:
            yield indices[start], end - start
            start = end


def choice_refusal(indices: Sequence[int]) -> str | None:
    """Return why indices of a dimension cannot be selected, or None."""
    if len(list(runs(indices))) > _MOST_PIECES:
        return f"it selects more than {_MOST_PIECES} pieces, each of which takes a node"
    return None


def chosen(emission: Emission, tracked: Tracked, axis: int, indices: Sequence[int]) -> Tracked:
    """Select indices of a dimension; consecutive ones take one slice.

    Args:
        axis: The dimension, of static size.
        indices: The selected indices, none negative.
    """
    parts = [emission.sliced(tracked, axis, start, count) for start, count in runs(indices)]
    return joined(emission, parts, axis, tracked.preferred)


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
    if value.shape[0] <= _MOST_INDICES:
        return None
    indices = _computed(tensors[0])
    if indices is None:
        return f"it selects more than {_MOST_INDICES} indices, each of which takes a node"
    return choice_refusal([index % size for index in indices])


def _computed(node: fx.Node) -> list[int] | None:
    """Return indices computed from numbers only, or None if they read constants."""
    chain = [node]
    for link in chain:
        value = link.meta.get("val")
        if link.op != "call_function" or not isinstance(value, torch.Tensor):
            return None
        if len(chain) > _MOST_INDICES or value.numel() > _MOST_COMPUTED:
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
    refusals = (choice_refusal(range(int(size))[::-1]) for size in sizes)
    return next(filter(None, refusals), None)


CHOOSING: Table = table(
    {
        "index_select index.Tensor": move(_choose, _choose_refusal),
        "flip": move(_flip, _flip_refusal),
    }
)
