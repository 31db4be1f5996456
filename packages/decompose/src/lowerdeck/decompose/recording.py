"""Trace of one call without dead code, and arguments in the form of the dispatcher."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node

from lowerdeck.torch_base import OpOverload, schema_of


@dataclass(slots=True)
class Recording:
    """Trace of one call.

    Attributes:
        graph: Functional graph without output node.
        inputs: Placeholders in input order.
        result: The result tree, with nodes for tensors and symbols.
        written: New values of mutated inputs, by position.
        returned: Index of the input that is returned as a result leaf, by position of the leaf.
        shared: Inputs that alias a result leaf, by position of the leaf.
        unaliased: Positions of leaves that alias no input and no other leaf.
        differentiable: Positions of leaves that require gradients.
        unbacked: Whether unbacked symbols were created.
        tokens: Whether effect tokens are used.
    """

    graph: Graph
    inputs: list[Node]
    result: Any
    written: dict[int, Node] = field(default_factory=dict)
    returned: dict[int, int] = field(default_factory=dict)
    shared: dict[int, list[int]] = field(default_factory=dict)
    unaliased: set[int] = field(default_factory=set)
    differentiable: set[int] = field(default_factory=set)
    unbacked: bool = False
    tokens: bool = False


def eliminate_dead_code(graph: Graph, kept: Container[Node] = ()) -> None:
    """Erase unused calls.

    Args:
        kept: Unused calls that stay.
    """
    # ``Graph.eliminate_dead_code`` is slower: it lints the graph and checks each node.
    for node in reversed(graph.nodes):
        is_dead = not node.users and node.op == "call_function" and node not in kept
        # Random operators are impure: removing one would change later random numbers.
        if is_dead and not node.is_impure():
            graph.erase_node(node)


def as_dispatched(
    operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call as the dispatcher passes them, without defaults."""
    remaining = dict(kwargs)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    needed = 0
    for index, argument in enumerate(schema_of(operator).arguments):
        if index >= len(args) and not remaining:
            break
        passed = args[index] if index < len(args) else remaining.pop(argument.name, _MISSING)
        # Optional arguments without a default have the default value None.
        is_default = passed is _MISSING or (
            argument.has_default_value()
            and type(passed) is type(argument.default_value)
            and passed == argument.default_value
        )
        value = argument.default_value if passed is _MISSING else passed
        if argument.kwarg_only:
            if not is_default:
                named[argument.name] = value
            continue
        positional.append(value)
        if not is_default:
            needed = len(positional)
    return tuple(positional[:needed]), named


_MISSING = object()
