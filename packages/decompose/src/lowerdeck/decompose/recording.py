"""The trace of one call, and arguments as torch's dispatcher passes them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node

from lowerdeck.torch_base import OpOverload, schema_of


@dataclass(slots=True)
class Recording:
    """The trace of one call.

    Attributes:
        graph: A functional graph of its tensors and symbols, without output.
        inputs: The placeholders, in the order of the inputs.
        result: The returned tree, with nodes for tensors and symbols.
        written: The new values of the inputs that it wrote, by position.
        returned: Inputs that were returned themselves, by position among the leaves of the result.
        shared: Inputs that a leaf shares memory with, by position of the leaf.
        alone: Positions of leaves that share memory with no input and no other leaf.
        differentiable: Positions of leaves that require gradients.
        unbacked: Whether it created sizes that are known only when the program runs.
        tokens: Whether it has effects that torch orders by tokens.
    """

    graph: Graph
    inputs: list[Node]
    result: Any
    written: dict[int, Node] = field(default_factory=dict)
    returned: dict[int, int] = field(default_factory=dict)
    shared: dict[int, list[int]] = field(default_factory=dict)
    alone: set[int] = field(default_factory=set)
    differentiable: set[int] = field(default_factory=set)
    unbacked: bool = False
    tokens: bool = False


def eliminate_dead_code(graph: Graph, kept: Container[Node] = ()) -> None:
    """Erase calls that no node reads.

    Args:
        kept: Calls that stay although no node reads them.
    """
    # ``Graph.eliminate_dead_code`` checks the graph first, and whether each node is impure.
    for node in reversed(graph.nodes):
        is_dead = not node.users and node.op == "call_function" and node not in kept
        # Random operators are impure: dropping one would change the numbers drawn after it.
        if is_dead and not node.is_impure():
            graph.erase_node(node)


def as_dispatched(
    operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call as torch's dispatcher passes them, without defaults."""
    left = dict(kwargs)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    needed = 0
    for index, argument in enumerate(schema_of(operator).arguments):
        if index >= len(args) and not left:
            break
        passed = args[index] if index < len(args) else left.pop(argument.name, _MISSING)
        # An optional argument without a default has the default value None all the same.
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
