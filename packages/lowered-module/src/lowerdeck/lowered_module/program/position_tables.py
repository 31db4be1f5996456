"""Replace relative-position biases by lookup tables.

T5 and similar models look up a bias by the bucket of each distance between positions, which
several operators compute. If sizes are bounded, so are distances: a table stores the bias of each
distance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

from lowerdeck.lowered_module.program.constants import add_constants, constant_inputs
from lowerdeck.lowered_module.program.copies import shared_copy
from lowerdeck.lowered_module.program.masks import (
    ARANGE,
    EMBEDDING,
    MOVES,
    SAME_NUMBERS,
    erase_unread,
    insert_call,
    range_of,
)
from lowerdeck.torch_base import Extent, MemoryMap, size_range, varies

_aten = torch.ops.aten
_ELEMENTWISE = frozenset({*SAME_NUMBERS, _aten.full_like.default} - {_aten.slice.Tensor})
"""Elementwise operators that lack ``torch.Tag.pointwise``."""
_SUMS = (_aten.add.Tensor, _aten.sub.Tensor)
_INTEGERS = (torch.int64, torch.int32)
_FEWEST = 3
"""Fewest calls that a table replaces."""
_MOST_BYTES = 1 << 20
"""Largest size of a table."""


class _Lookup(NamedTuple):
    """A lookup by a function of integers in a known range.

    Attributes:
        root: The node of the integers.
        least: Lower bound of the integers.
        table: The result for each integer, from the lower to the upper bound.
    """

    root: Node
    least: int
    table: torch.Tensor


def with_position_tables(
    program: ExportedProgram, changed: MemoryMap | None = None
) -> ExportedProgram:
    """Return a program with tables in place of functions of distances between positions.

    Args:
        program: A functional program; not changed, and returned itself if it has no such lookup.
        changed: The memory that other methods change.
    """
    lookups = _lookups(program, changed)
    if not lookups:
        return program
    copied = shared_copy(program)
    nodes = {node.name: node for node in copied.graph.nodes}
    tables = add_constants(copied, [lookup.table for lookup in lookups.values()])
    for (name, lookup), table in zip(lookups.items(), tables, strict=True):
        node, places = nodes[name], nodes[lookup.root.name]
        value = places.meta["val"]
        if lookup.least and places.target in _SUMS:
            # Shift one operand, which has the elements of one dimension.
            first, second = places.args[:2]
            shift = (first, lookup.least)
            shifted = insert_call(places, _aten.sub.Tensor, shift, first.meta["val"])
            places = insert_call(node, places.target, (shifted, second), value)
        elif lookup.least:
            places = insert_call(node, _aten.sub.Tensor, (places, lookup.least), value)
        result = insert_call(node, EMBEDDING, (table, places), node.meta["val"])
        node.replace_all_uses_with(result)
        erase_unread(copied.graph, [node])
    copied.graph_module.recompile()
    return copied


def _lookups(program: ExportedProgram, changed: MemoryMap | None) -> dict[str, _Lookup]:
    """Return the lookups of a program by node name."""
    lookups: dict[str, _Lookup] = {}
    limits: dict[Node, tuple[int, int]] = {}
    roots: dict[Node, Node] = {}
    weights: dict[Node, str] | None = None
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        if node.target is EMBEDDING:
            weight, index = node.args[:2]
            chain = _chain(index, roots)
            if len(chain) <= _FEWEST or not any(map(varies, value.shape)):
                continue
            weights = constant_inputs(program) if weights is None else weights
            data = {**program.state_dict, **program.constants}.get(weights.get(weight, ""))
            if data is None or (changed and changed.find(Extent.of(data))):
                continue
            table = _table(data, chain, *limits[chain[0]])
            if table is not None:
                lookups[node.name] = _Lookup(chain[0], limits[chain[0]][0], table)
            continue
        bounds = _limits(node, limits, program.range_constraints)
        if bounds is not None:
            limits[node] = bounds
        root, *others = {
            roots.get(source) for source in node.all_input_nodes if not _is_number(source)
        } or (None,)
        if root is not None and not others and _is_elementwise(node):
            roots[node] = root
        elif bounds is not None:
            roots[node] = node
    return lookups


def _limits(
    node: Node, limits: Mapping[Node, tuple[int, int]], ranges: Mapping[Any, Any]
) -> tuple[int, int] | None:
    """Return the smallest and the largest number in a tensor of positions or distances."""
    args: Any = node.args
    if node.meta["val"].dtype not in _INTEGERS:
        return None
    if node.target in ARANGE:
        line, most = range_of(node), size_range(node.meta["val"].shape[0], ranges)[1]
        if line is None or most is None:
            return None
        last = line.first + line.step * max(0, most - 1)
        return min(line.first, last), max(line.first, last)
    if node.target in MOVES or node.target in SAME_NUMBERS:
        return limits.get(args[0])
    if node.target in _SUMS and not node.kwargs:
        first, second = ((n, n) if type(n) is int else limits.get(n) for n in args[:2])
        if first is None or second is None:
            return None
        if node.target is _aten.add.Tensor:
            return first[0] + second[0], first[1] + second[1]
        return first[0] - second[1], first[1] - second[0]
    return None


def _is_elementwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    is_random = torch.Tag.nondeterministic_seeded in tags
    return node.target in _ELEMENTWISE or (torch.Tag.pointwise in tags and not is_random)


def _is_number(node: Node) -> bool:
    """Return whether a node is a constant number, as an operand of ``where``."""
    value = node.meta.get("val")
    is_single = isinstance(value, torch.Tensor) and value.dim() == 0
    return is_single and node.op == "call_function" and not node.all_input_nodes


def _chain(index: Any, roots: Mapping[Node, Node]) -> list[Node]:
    """Return the integers that an index depends on, and all calls in between, in order."""
    if index not in roots:
        return []
    chain, waiting = {roots[index]}, [index]
    while waiting:
        node = waiting.pop()
        if node not in chain:
            chain.add(node)
            waiting += node.all_input_nodes
    return sorted(chain)


def _table(
    weight: torch.Tensor, chain: Sequence[Node], least: int, most: int
) -> torch.Tensor | None:
    """Return the rows of a weight for each integer from ``least`` to ``most``.

    The result is None if the rows exceed ``_MOST_BYTES``, or the weight has too few rows.
    """
    if (most - least + 1) * weight[:1].nbytes > _MOST_BYTES:
        return None
    root = chain[0]
    numbers = torch.arange(least, most + 1, dtype=root.meta["val"].dtype)
    results: dict[Node, Any] = {root: numbers}
    try:
        for node in chain[1:]:
            target: Any = node.target
            args, kwargs = map_arg((node.args, node.kwargs), results.__getitem__)
            results[node] = target(*args, **kwargs)
        return weight.detach()[results[chain[-1]]].contiguous()
    except IndexError:
        # The weight has too few rows for the longest inputs, which fail at run time.
        return None
