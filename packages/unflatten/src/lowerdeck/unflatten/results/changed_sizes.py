"""Which sizes change with one size of a result, in what the code computes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import Node
from torch.fx.node import map_arg

from lowerdeck.torch_base import OpOverload
from lowerdeck.unflatten.results.result_check import Sizes, sizes_of


@dataclass(frozen=True, slots=True)
class Changed:
    """A tensor that is of other sizes if a result is.

    Attributes:
        node: It.
        shape: Its recorded sizes.
        dims: Which of them change; none of what has another number of parts, all of which the
            code reads.
    """

    node: Node
    shape: tuple[Any, ...]
    dims: Sequence[int]


def changed_with(result: Node, dim: int) -> Iterator[Changed]:
    """Yield what changes with a size of a result, that result first.

    What the code computes of the result itself is computed for another size, without any data.

    Args:
        result: What a call returned.
        dim: The dimension that has another size.
    """
    recorded: Sizes = sizes_of(result)
    yield Changed(result, recorded.shape, (dim,))
    numbers: dict[sympy.Symbol, int] = {}
    size = [_number(each, numbers) for each in recorded.shape][dim]
    # A smaller one, too: of a larger one a slice of so many elements is as it was.
    for other in {2 * size: None, size // 2: None}:
        if other != size:
            yield from _changed_by(result, dim, other, numbers)


def _changed_by(
    result: Node, dim: int, size: int, numbers: dict[sympy.Symbol, int]
) -> Iterator[Changed]:
    """Yield what else changes if a dimension of a result has this size."""
    recorded: Sizes = sizes_of(result)
    shape = [_number(each, numbers) for each in recorded.shape]
    shape[dim] = size
    made: dict[Node, Any] = {result: torch.empty(shape, dtype=recorded.dtype, device="meta")}
    queue = [result]
    for node in queue:
        for user in sorted(user for user in node.users if user not in made):
            value = _computed(user, made, numbers)
            if isinstance(value, (tuple, list)):
                made[user] = value
                queue.append(user)
                if _reads_all(user, numbers, len(value)):
                    yield Changed(user, (), ())
            sizes = sizes_of(user)
            if not (isinstance(value, torch.Tensor) and isinstance(sizes, Sizes)):
                continue
            if value.dim() != len(sizes.shape):
                continue
            now = zip(value.shape, sizes.shape, strict=True)
            dims = [
                at
                for at, (each, size) in enumerate(now)
                if each != (size if isinstance(size, int) else _number(size, numbers))
            ]
            if dims:
                made[user] = value
                queue.append(user)
                yield Changed(user, sizes.shape, dims)


def _computed(node: Node, made: Mapping[Node, Any], numbers: dict[sympy.Symbol, int]) -> Any:
    """Return what a step makes of other sizes; None where it takes none, or computes no such."""
    if node.target is getitem and isinstance(node.args[1], int):
        parts = made[node.args[0]] if isinstance(node.args[0], Node) else ()
        is_there = isinstance(parts, (tuple, list)) and node.args[1] < len(parts)
        return parts[node.args[1]] if is_there else None
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    try:
        args, kwargs = map_arg(
            (node.args, node.kwargs),
            lambda each: made[each] if each in made else _example(each, numbers),
        )
        return node.target(*args, **{**kwargs, **_on_meta(kwargs)})
    except Exception:  # the code takes no other size there, or no such tensors
        return None


def _reads_all(node: Node, numbers: dict[sympy.Symbol, int], parts: int) -> bool:
    """Return whether the code reads all parts that were recorded, and these are not so many.

    It is told so by the number of parts: a loop over them is no more than what was done for each.
    """
    recorded = _computed(node, {}, numbers)
    read = {each.args[1] for each in node.users if each.target is getitem and each.users}
    is_recorded = isinstance(recorded, (tuple, list)) and len(read) == len(recorded)
    return is_recorded and parts != len(read)


def _number(size: Any, numbers: dict[sympy.Symbol, int]) -> int:
    """Return a size, with numbers of our own for the symbols."""
    if isinstance(size, sympy.Basic):
        for symbol in sorted(size.free_symbols, key=str):
            numbers.setdefault(symbol, 6 + 4 * len(numbers))
        return int(size.subs(numbers))
    return int(size)


def _example(node: Any, numbers: dict[sympy.Symbol, int]) -> Any:
    sizes = sizes_of(node)
    if isinstance(sizes, Sizes):
        shape = [_number(size, numbers) for size in sizes.shape]
        return torch.empty(shape, dtype=sizes.dtype, device="meta")
    return _number(sizes, numbers)


def _on_meta(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("meta")} if kwargs.get("device") is not None else {}
