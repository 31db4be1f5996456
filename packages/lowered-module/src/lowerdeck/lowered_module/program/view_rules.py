"""Operators that compute the same before and after a view that merges dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from lowerdeck.lowered_module.program.merged_sizes import (
    Parts,
    numbered,
    only_part,
    shape_of,
)
from lowerdeck.torch_base import arguments_of

_aten = torch.ops.aten


def no_arguments(node: Node, parts: Parts) -> dict[str, Any]:
    """Return no arguments."""
    del node, parts
    return {}


@dataclass(frozen=True, slots=True)
class Rule:
    """How an operator computes the same of its first argument in parts.

    Attributes:
        parts: Returns the parts of the result, or None where it needs the merged dimensions.
        args: Returns the arguments that speak of other dimensions, by name.
        is_move: Whether it only moves elements.
    """

    parts: Callable[[Node, Parts], Parts | None]
    args: Callable[[Node, Parts], dict[str, Any]] = no_arguments
    is_move: bool = False


def _same(node: Node, parts: Parts) -> Parts | None:
    return parts if node.kwargs.get("memory_format") in _PLAIN else None


_PLAIN = (None, torch.contiguous_format, torch.preserve_format)


def _layer(node: Node, parts: Parts) -> Parts | None:
    return (*parts[:-1], (shape_of(node)[-1],)) if len(parts[-1]) == 1 else None


def _layer_norm(node: Node, parts: Parts) -> Parts | None:
    folded: Any = arguments_of(node)["normalized_shape"]
    return parts if all(len(one) == 1 for one in parts[-len(folded) :]) else None


def _channels(node: Node, parts: Parts) -> Parts | None:
    del node
    return parts if len(parts[0]) == len(parts[1]) == 1 else None


def _along(node: Node, parts: Parts) -> Parts | None:
    """Return parts where an operator changes the size of one dimension."""
    axis = _axis(node)
    if len(shape_of(node)) != len(parts) or only_part(parts[axis]) is None:
        return None
    place, size = only_part(parts[axis]), shape_of(node)[axis]
    new = tuple(size if at == place else one for at, one in enumerate(parts[axis]))
    return (*parts[:axis], new, *parts[axis + 1 :])


def _along_args(node: Node, parts: Parts) -> dict[str, Any]:
    axis = _axis(node)
    return {"dim": sum(map(len, parts[:axis])) + (only_part(parts[axis]) or 0)}


def _axis(node: Node) -> int:
    return int(arguments_of(node).get("dim", -1)) % len(shape_of(node))


def _turned(node: Node, parts: Parts) -> Parts | None:
    return tuple(parts[axis] for axis in _order(node))


def _turned_args(node: Node, parts: Parts) -> dict[str, Any]:
    dims = numbered(parts)
    return {"dims": [dim for axis in _order(node) for dim in dims[axis]]}


def _order(node: Node) -> list[int]:
    rank = len(shape_of(node))
    args: Any = arguments_of(node)
    if "dims" in args:
        return [axis % rank for axis in args["dims"]]
    order = list(range(rank))
    first, second = args["dim0"], args["dim1"]
    order[first], order[second] = order[second], order[first]
    return order


_SAME = Rule(_same)
_ALONG = Rule(_along, _along_args)
TURN = Rule(_turned, _turned_args, is_move=True)
RULES: Mapping[Any, Rule] = {
    **dict.fromkeys(
        [
            *(_aten.relu.default, _aten.gelu.default, _aten.silu.default, _aten.sigmoid.default),
            *(_aten.tanh.default, _aten.neg.default, _aten.abs.default, _aten.exp.default),
            *(_aten.hardswish.default, _aten.hardtanh.default, _aten.leaky_relu.default),
            *(_aten.elu.default, _aten.clamp.default, _aten.pow.Tensor_Scalar),
            *(_aten.clone.default, _aten.contiguous.default, _aten.alias.default),
            *(_aten.dropout.default, _aten.mul.Scalar, _aten.add.Scalar, _aten.div.Scalar),
        ],
        _SAME,
    ),
    **dict.fromkeys([_aten.slice.Tensor, _aten.glu.default], _ALONG),
    **dict.fromkeys(
        [_aten.permute.default, _aten.permute_copy.default, _aten.transpose.int], TURN
    ),
    **dict.fromkeys([_aten.batch_norm.default, _aten.group_norm.default], Rule(_channels)),
    _aten.linear.default: Rule(_layer),
    _aten.layer_norm.default: Rule(_layer_norm),
}
