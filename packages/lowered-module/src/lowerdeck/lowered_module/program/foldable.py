"""Find and compute nodes that depend on constants only: masks, positions, sine tables."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from lowerdeck.torch_base import Behaviours, Effect, OpOverload, returns_view, schema_of

_MOST_BYTES = 4 << 20
"""Largest result that may take more bytes than its inputs."""
_ALL_BYTES = 8 * _MOST_BYTES
"""Largest sum of the results that are kept in memory."""
_aten = torch.ops.aten
_MODES = frozenset({"wrap_with_set_grad_enabled", "wrap_with_autocast"})
"""Calls of a subgraph under a mode of torch that does not affect folding."""
ASSERTION = _aten._assert_tensor_metadata.default
"""Assertion of the dtype and device that the export recorded for a tensor."""
_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default})
_MAY_COPY = frozenset({_aten.reshape.default, _aten.flatten.using_ints, _aten.contiguous.default})
"""Operators that return a view where possible, otherwise a copy."""
_INNER_TENSOR = "export.access_subclass_inner_tensor.default"
"""Reads an inner tensor of a tensor subclass, such as torchao's."""
_SIZES_ONLY = frozenset(
    {
        *(_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default),
        *(_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
    }
)
"""Operators that read no element of their first argument."""


def foldable_nodes(
    nodes: Iterable[Node], constants: Collection[str], *, in_memory: bool = False
) -> list[Node]:
    """Return the calls whose results depend on constants only.

    A backend may compute them ahead of time. Calls are left out if they are not of aten, draw
    random numbers, mutate a tensor in place, or would make the file much larger.

    Args:
        nodes: Nodes of a graph, each after those that it reads.
        constants: Names of the placeholders whose tensors never change.
        in_memory: Whether all results are kept in memory. If so, each result and their sum are
        limited in bytes.

    Returns:
        The nodes, in order.
    """
    computable: dict[Node, None] = {}
    left = _ALL_BYTES
    for node in nodes:
        if node.op != "call_function":
            continue
        skipped = node.args[0] if node.target in _SIZES_ONLY else None
        # Checked first: nearly every call depends on an input.
        if (
            all(
                source is skipped
                or source in computable
                or source.op == "get_attr"
                or (source.op == "placeholder" and source.name in constants)
                for source in node.all_input_nodes
            )
            and _is_computable(node)
            and _is_small(node, in_memory=in_memory)
        ):
            size = _allocated_bytes(node) if in_memory else 0
            if size <= left:
                left -= size
                computable[node] = None
    return list(computable)


def mode_stretches(nodes: Iterable[Node], behaviours: Behaviours) -> dict[Node, int]:
    """Return the number of mode changes (such as ``no_grad``) before each node.

    A partition is called in one mode, so it must not contain nodes with different numbers.

    Args:
        nodes: The nodes of a graph, in order.
    """
    changes, stretches = 0, {}
    for node in nodes:
        stretches[node] = changes
        if not behaviours.is_plain(node) and behaviours.effect(node) & Effect.MODE:
            changes += 1
    return stretches


def read_by_one(
    computable: Sequence[Node],
    partitions: Sequence[Sequence[Node]],
    stretches: Mapping[Node, int] = MappingProxyType({}),
) -> list[Node]:
    """Return the foldable calls whose users are all in one partition.

    Assertions about a tensor's metadata do not count as users.

    Args:
        computable: Calls that depend on constants only, in order.
        partitions: The nodes of each partition; may include ``computable``.
        stretches: From :func:`mode_stretches`; a call with a user in another stretch is left out.
    """
    part_of = {node: number for number, part in enumerate(partitions) for node in part}
    ahead = set(computable)
    readers: dict[Node, int] = {}
    kept = []
    for node in reversed(computable):
        where = stretches.get(node)
        single = {
            -1
            if stretches.get(user) != where
            else readers.get(user, -1)
            if user in ahead
            else part_of.get(user, -1)
            for user in node.users
            if user.target is not ASSERTION
        }
        readers[node] = single.pop() if len(single) == 1 else -1
        if readers[node] != -1:
            kept.append(node)
    return kept[::-1]


def fold_node(node: Node, read: Callable[[Node], Any]) -> Any:
    """Return the result of a call from ``foldable_nodes``.

    Args:
        read: Returns the value of a constant, or of a call that was already computed.
    """

    def value(source: Node) -> Any:
        if source.op == "get_attr":
            return getattr(node.graph.owning_module, str(source.target))
        if node.target in _SIZES_ONLY:
            seen = source.meta["val"]
            # Only `new_zeros` and similar operators may have symbolic sizes, which they ignore.
            sizes = seen.shape if all(isinstance(size, int) for size in seen.shape) else ()
            return torch.zeros((), dtype=seen.dtype).expand(sizes)
        return read(source)

    args: Any
    args, kwargs = map_arg((node.args, node.kwargs), value)
    # A computed value may have other strides than in the program, so a view may fail.
    target: Any = _aten.reshape.default if node.target in _VIEWS else node.target
    with torch.no_grad():
        return target(*args, **kwargs)


def _is_computable(node: Node) -> bool:
    target = node.target
    if target is operator.getitem or str(target) == _INNER_TENSOR:
        return True
    if getattr(target, "__name__", "") in _MODES:
        (name,) = (
            str(source.target) for source in node.all_input_nodes if source.op == "get_attr"
        )
        inner = getattr(node.graph.owning_module, name).graph.nodes
        calls = [source for source in inner if source.op == "call_function"]
        return all(source.target is ASSERTION or _is_computable(source) for source in calls)
    if not isinstance(target, OpOverload) or target.namespace != "aten" or not _tensors(node):
        return False
    drawn = torch.Tag.nondeterministic_seeded in target.tags
    return not drawn and not schema_of(target).is_mutable


def _tensors(node: Node) -> Sequence[torch.Tensor]:
    """Return the fake results of fixed sizes; an empty list if a result is not a tensor."""
    value = node.meta.get("val")
    results = value if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(tensor, torch.Tensor) for tensor in results):
        return []
    return [tensor for tensor in results if all(isinstance(size, int) for size in tensor.shape)]


def _is_small(node: Node, *, in_memory: bool) -> bool:
    if in_memory:
        return _allocated_bytes(node) <= _MOST_BYTES
    bytes_read = sum(_bytes(source) for source in node.all_input_nodes)
    # Each result by itself: standardized weights come with their means and deviations.
    return all(result.nbytes <= max(_MOST_BYTES, bytes_read) for result in _tensors(node))


def _allocated_bytes(node: Node) -> int:
    """Return the number of bytes that a call allocates: 0 for a view."""
    target = node.target
    if target is operator.getitem or str(target) == _INNER_TENSOR:
        return 0
    dtypes = {
        tensor.dtype for source in (node, *node.all_input_nodes) for tensor in _tensors(source)
    }
    is_view = returns_view(target) and target not in _MAY_COPY and len(dtypes) == 1
    return 0 if is_view else _bytes(node)


def _bytes(node: Node) -> int:
    return sum(tensor.nbytes for tensor in _tensors(node))
