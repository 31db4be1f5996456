"""The record of one traced call, and its arguments as torch's dispatcher passes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from lowerdeck.torch_base import OpOverload, schema_of


@dataclass(slots=True)
class Recording:
    """What one call did.

    Attributes:
        graph: Placeholders for its tensors and symbols, and what was called on them; no output.
        inputs: The placeholders.
        result: What it returned, nodes of ``graph`` for tensors and symbols.
        written: For each input that it wrote, the node with what the input is now.
        returned: By position among the leaves of the result, the input that was returned itself.
        shared: By position among the leaves, the inputs that share memory with it.
        alone: Positions among the leaves of what shares memory with no input and no other result.
        differentiable: Positions among the leaves of what requires gradients.
        unbacked: Whether it created sizes that are known only when the program runs.
        tokens: Whether it has effects that torch orders by tokens.
    """

    graph: Graph
    inputs: list[Node]
    result: Any
    written: dict[int, Node]
    returned: dict[int, int]
    shared: dict[int, list[int]]
    alone: set[int]
    differentiable: set[int]
    unbacked: bool
    tokens: bool


def as_dispatched(
    operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call as torch's dispatcher hands them on, without defaults."""
    left = dict(kwargs)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    needed = 0
    for index, argument in enumerate(schema_of(operator).arguments):
        given = args[index] if index < len(args) else left.pop(argument.name, _MISSING)
        # An optional argument without a default has the default value None all the same.
        is_default = given is _MISSING or (
            argument.has_default_value()
            and type(given) is type(argument.default_value)
            and given == argument.default_value
        )
        value = argument.default_value if given is _MISSING else given
        if argument.kwarg_only:
            if not is_default:
                named[argument.name] = value
            continue
        positional.append(value)
        if not is_default:
            needed = len(positional)
    return tuple(positional[:needed]), named


_MISSING = object()
