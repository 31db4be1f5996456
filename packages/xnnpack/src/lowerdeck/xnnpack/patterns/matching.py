"""Patterns of calls, matched backwards from the last call."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch.fx import Node

from lowerdeck.torch_base import OpOverload, arguments_of, schema_of
from lowerdeck.xnnpack.emit import fake, named, same_sizes
from lowerdeck.xnnpack.operators.contract import ASSERTION

_aten = torch.ops.aten
_VALUELESS = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format", "implicit"})
"""Arguments that do not affect values; result dtypes are compared separately."""
_KEEPING = frozenset(
    named(
        "alias clone contiguous detach expand flatten.using_ints reshape slice.Tensor "
        "to.dtype _to_copy _unsafe_view view"
    )
)
"""Operators that are no-ops if sizes and dtype stay the same."""
LAYING = frozenset(
    named(
        "view reshape _unsafe_view flatten.using_ints to.dtype _to_copy clone contiguous "
        "alias detach"
    )
)
"""Operators that keep the order of elements, and the values of integers."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """Any tensor, optionally of one dtype; the same tensor at each use of its name."""

    name: str
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Amount:
    """A number literal; the same number at each use of its name."""

    name: str


@dataclass(frozen=True, slots=True)
class AnyArg:
    """Any non-tensor argument; callers check the result's shape instead."""


@dataclass(frozen=True, slots=True)
class LastAxis:
    """The last dimension, as a number from either end or a list of one."""


class Piece:
    """A call of one of several operators.

    Args:
        ops: The names of the operators.
        *args: Patterns of the arguments, in the order of the schema. Omitted ones must have their
            defaults.
        commutes: Whether the first two arguments may be swapped.
        name: Name of the call in the match, none by default.
    """

    def __init__(self, ops: str, *args: Pattern, commutes: bool = False, name: str = "") -> None:
        self.ops: frozenset[object] = frozenset(named(ops))
        self.args: tuple[Pattern, ...] = args
        self.commutes: bool = commutes
        self.name: str = name


@dataclass(frozen=True, slots=True)
class Both:
    """A value that matches two patterns."""

    first: Pattern
    second: Pattern


@dataclass(frozen=True, slots=True)
class Viewed:
    """A tensor after any number of views, copies and casts; a leaf binds the tensor before them.

    If it is the outermost pattern, the caller must check dtypes.
    """

    pattern: Pattern

    @property
    def ops(self) -> frozenset[object]:
        """The operators of its last call."""
        assert isinstance(self.pattern, Piece)
        return LAYING | self.pattern.ops


Pattern: TypeAlias = (
    Leaf
    | Amount
    | AnyArg
    | LastAxis
    | Piece
    | Both
    | Viewed
    | tuple[Any, ...]
    | list[int]
    | int
    | float
    | bool
    | None
)
"""A pattern; a tuple lists alternatives, in order of preference."""


class Match(NamedTuple):
    """Match of a pattern.

    Attributes:
        bindings: Leaves, amounts and named calls, by name.
        pieces: The calls, from last to first.
    """

    bindings: Mapping[str, Any]
    pieces: tuple[Node, ...]

    def with_binding(self, name: str, value: object) -> Match:
        """Return the match with an additional binding."""
        return Match({**self.bindings, name: value}, self.pieces) if name else self

    def with_piece(self, node: Node) -> Match:
        """Return the match with an additional call."""
        return Match(self.bindings, (*self.pieces, node))


def is_possible(pattern: Pattern, targets: Collection[object]) -> bool:
    """Return whether a graph with these operators and dtypes may match a pattern."""
    if isinstance(pattern, Leaf):
        return pattern.dtype is None or pattern.dtype in targets
    if isinstance(pattern, tuple):
        return any(is_possible(option, targets) for option in pattern)
    if isinstance(pattern, Viewed):
        return is_possible(pattern.pattern, targets)
    if isinstance(pattern, Both):
        return is_possible(pattern.first, targets) and is_possible(pattern.second, targets)
    if isinstance(pattern, Piece):
        return not pattern.ops.isdisjoint(targets) and all(
            is_possible(argument, targets) for argument in pattern.args
        )
    return True


def matches(pattern: Pattern, node: Node) -> Iterator[Match]:
    """Yield the matches of a pattern whose last call is a node.

    No-ops (a clone, a view to the same sizes, a dropout in evaluation) may occur between calls of
    the pattern. All values have the dtype of the last, except bools and intermediate indices. For
    a ``Viewed`` pattern the caller checks dtypes.

    Args:
        node: A call; not skipped even if it is a no-op.
    """
    last = fake(node)
    if last is not None:
        for match in _matches(pattern, node, Match({}, ())):
            one_dtype = isinstance(pattern, Viewed) or _is_of_one_dtype(match, last)
            if match.pieces[0] is node and _is_closed(match) and one_dtype:
                yield match


def _is_closed(match: Match) -> bool:
    """Return whether intermediate results are only read inside the match."""
    inside = set(match.pieces)
    readers = (user for node in match.pieces[1:] for user in node.users)
    return all(user in inside or user.target is ASSERTION for user in readers)


def _is_of_one_dtype(match: Match, last: torch.Tensor) -> bool:
    # Intermediate results may be bools or indices; leaves are never indices.
    pieces = set(match.pieces)
    leaves = [
        leaf for leaf in match.bindings.values() if isinstance(leaf, Node) and leaf not in pieces
    ]
    return _have_dtypes(match.pieces, {last.dtype, torch.bool, torch.int64}) and _have_dtypes(
        leaves, {last.dtype, torch.bool}
    )


def _have_dtypes(nodes: Sequence[Node], dtypes: set[torch.dtype]) -> bool:
    values = [fake(node) for node in nodes]
    return all(tensor is not None and tensor.dtype in dtypes for tensor in values)


def _matches(pattern: Pattern, value: object, match: Match) -> Iterator[Match]:
    if isinstance(pattern, tuple):
        for option in pattern:
            yield from _matches(option, value, match)
    elif isinstance(pattern, Both):
        for begun in _matches(pattern.first, value, match):
            yield from _matches(pattern.second, value, begun)
    elif isinstance(pattern, Viewed):
        if isinstance(value, Node) and value.target in LAYING and isinstance(value.args[0], Node):
            yield from _matches(pattern, value.args[0], match.with_piece(value))
        yield from _matches(pattern.pattern, value, match)
    elif isinstance(pattern, Leaf):
        if isinstance(value, Node) and match.bindings.get(pattern.name, value) is value:
            tensor = fake(value) if pattern.dtype else None
            if pattern.dtype is None or (tensor is not None and tensor.dtype == pattern.dtype):
                yield match.with_binding(pattern.name, value)
    elif isinstance(pattern, Amount):
        if _is_number(value) and match.bindings.get(pattern.name, float(value)) == value:
            yield match.with_binding(pattern.name, float(value))
    elif isinstance(pattern, Piece):
        if isinstance(value, Node):
            yield from _calls(pattern, value, match)
            if changes_nothing(value):
                yield from _matches(pattern, value.args[0], match.with_piece(value))
    elif _is_equal(pattern, value):
        yield match


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_equal(pattern: object, value: object) -> bool:
    if isinstance(pattern, AnyArg):
        return not (isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor))
    if isinstance(value, Node) or isinstance(pattern, bool) or isinstance(value, bool):
        return value is pattern
    return bool(value == pattern) and (value is None) == (pattern is None)


def _calls(pattern: Piece, node: Node, match: Match) -> Iterator[Match]:
    target = node.target
    if target not in pattern.ops or not isinstance(target, OpOverload):
        return
    defaults = _defaults(target)
    arguments = list(arguments_of(node).items())
    mentioned = [value for _, value in arguments[: len(pattern.args)]]
    if len(pattern.args) > len(defaults) or any(
        name not in _VALUELESS and (isinstance(value, Node) or value != defaults[name])
        for name, value in arguments[len(pattern.args) :]
    ):
        return
    begun = match.with_piece(node).with_binding(pattern.name, node)
    orders = [mentioned]
    if pattern.commutes:
        orders.append([mentioned[1], mentioned[0], *mentioned[2:]])
    for order in orders:
        yield from _all(list(zip(pattern.args, order, strict=True)), node, begun)


@cache
def _defaults(operator: OpOverload) -> dict[str, Any]:
    """Return the default of each argument of an operator, None without one."""
    return {argument.name: argument.default_value for argument in schema_of(operator).arguments}


def _all(pairs: list[tuple[Pattern, Any]], node: Node, match: Match) -> Iterator[Match]:
    if not pairs:
        yield match
        return
    (pattern, value), *others = pairs
    if isinstance(pattern, LastAxis):
        if _is_last(value, node):
            yield from _all(others, node, match)
        return
    for extended in _matches(pattern, value, match):
        yield from _all(others, node, extended)


def _is_last(value: object, node: Node) -> bool:
    if isinstance(value, (list, tuple)):
        if len(value) != 1:
            return False
        (value,) = value
    source = fake(node.all_input_nodes[0])
    return (
        isinstance(value, int)
        and not isinstance(value, bool)
        and source is not None
        and source.dim() > 0
        and value % source.dim() == source.dim() - 1
    )


def is_empty(node: Node) -> bool:
    """Return whether a node is a tensor that provably has no elements."""
    value = fake(node)
    return value is not None and any(isinstance(size, int) and not size for size in value.shape)


def changes_nothing(node: Node) -> bool:
    """Return whether a call is a no-op on its first argument."""
    if node.target is _aten.dropout.default:
        return node.args[2] is False and isinstance(node.args[0], Node)
    source = node.args[0] if node.target in _KEEPING and node.args else None
    if not isinstance(source, Node):
        return False
    before, after = fake(source), fake(node)
    return (
        before is not None
        and after is not None
        and before.dtype == after.dtype
        and same_sizes(before.shape, after.shape)
    )
