"""Arguments of a call by the names of its operator's schema."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.fx import Node
from torch.fx.immutable_collections import immutable_list

from lowerdeck.torch_base._torch_private import OpOverload, schema_of


def arguments_of(node: Node) -> dict[str, Any]:
    """Return a call's arguments by name, in the schema's order, with defaults filled in.

    Returns:
        Names and values; these hold nodes where the call does. Where torch takes one number for
        several (``stride=[2]`` of a convolution in two dimensions), it is repeated.
        Empty without a schema, such as ``getitem``.

    Example:
        >>> import torch
        >>> program = torch.export.export(torch.nn.Softmax(0), (torch.ones(2),))
        >>> arguments_of(next(n for n in program.graph.nodes if n.op == "call_function"))
        {'self': input, 'dim': 0, 'dtype': None}
    """
    if not isinstance(node.target, OpOverload):
        return {}
    schema = _schema(node.target)
    arguments = {name: default for name, default, _ in schema}
    arguments.update(zip(arguments, node.args, strict=False))
    arguments.update(node.kwargs)
    for name, _, length in schema:
        value = arguments[name]
        # export keeps the short form that its user wrote.
        if length is not None and isinstance(value, (list, tuple)) and len(value) == 1:
            arguments[name] = immutable_list(list(value) * length)
    return arguments


@cache
def _schema(operator: OpOverload) -> tuple[tuple[str, Any, int | None], ...]:
    # Reading a schema costs more than all the rest of a node; there are few operators.
    return tuple(
        (argument.name, _fixed(argument.default_value), argument.N)  # type: ignore[attr-defined]
        for argument in schema_of(operator).arguments
    )


def _fixed(default: Any) -> Any:
    # All callers share the default.
    return immutable_list(default) if isinstance(default, list) else default
