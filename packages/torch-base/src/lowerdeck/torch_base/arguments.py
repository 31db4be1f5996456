"""Arguments of a call by schema name."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.fx import Node
from torch.fx.immutable_collections import immutable_list

from lowerdeck.torch_base._torch_private import OpOverload, schema_of


def arguments_of(node: Node) -> dict[str, Any]:
    """Return a call's arguments by name, in schema order, with defaults.

    Returns:
        Values by name; empty if there is no schema, as for ``getitem``. One-element lists such as
        ``stride=[2]`` are expanded to the schema's length.

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
        # torch.export keeps the one-element form.
        if length is not None and isinstance(value, (list, tuple)) and len(value) == 1:
            arguments[name] = immutable_list(list(value) * length)
    return arguments


@cache
def _schema(operator: OpOverload) -> tuple[tuple[str, Any, int | None], ...]:
    # Cached: reading a schema is slow.
    return tuple(
        (argument.name, _as_immutable(argument.default_value), argument.N)  # type: ignore[attr-defined]
        for argument in schema_of(operator).arguments
    )


def _as_immutable(default: Any) -> Any:
    # Immutable, because callers share it.
    return immutable_list(default) if isinstance(default, list) else default
