"""Results that are an argument: which operators return one, and whether a module still does.

``x.to(x.dtype)`` returns ``x``. Export gives ``x`` the name of the operator from then on, so that
a program does not tell whether who reads it means the argument or what the module returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from lowerdeck.torch_base import OpOverload, is_getitem, pytree, returns_written, schema_of
from lowerdeck.unflatten.calls.carrying import must_hand_through

GIVEN_BACK = "given_back"
"""Meta of what carries a result of a call: the place among ``nodes_given`` of what it was given
and returned, and which of its results it is."""

_RETURN_ARGUMENT = frozenset(
    f"aten::{name}"
    for name in (
        *("to", "type_as", "to_dense", "contiguous", "sum_to_size", "flatten"),
        *("_autocast_to_full_precision", "_autocast_to_reduced_precision"),
        *("_cast_Byte", "_cast_Char", "_cast_Double", "_cast_Float"),
        *("_cast_Half", "_cast_Int", "_cast_Long", "_cast_Short"),
        *("alpha_dropout", "feature_alpha_dropout", "feature_dropout", "native_dropout"),
        *("atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors"),
        *("positive", "real", "conj_physical", "resolve_conj", "resolve_neg"),
    )
)
"""What returns an argument where there is nothing to do."""


def argument_of(node: Node) -> Node | None:
    """Return the argument that the operator ``node`` returns; None if it computes something."""
    call, number = node, None
    if is_getitem(node) and isinstance(node.args[0], Node):
        call, number = node.args[0], node.args[1]
    if call.op != "call_function" or not isinstance(call.target, OpOverload) or not call.args:
        return None
    source: Any = call.args[0]
    if number is None and returns_written(call.target):
        return source if isinstance(source, Node) else None
    schema = schema_of(call.target)
    if schema.name not in _RETURN_ARGUMENT:
        return None
    if isinstance(source, (tuple, list)) and isinstance(number, int):
        source = source[number] if number < len(source) else None
    elif number:
        return None  # a mask
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    is_new = given.get("copy") is True or (given.get("train") is True and given.get("p") != 0)
    return source if isinstance(source, Node) and not is_new and _are_alike(node, source) else None


def nodes_given(call: Node) -> list[Node]:
    """Return the different nodes whose values a call is given, in containers too."""
    found: dict[Node, None] = {}
    for node in call.all_input_nodes:
        is_container = node.target is pytree.tree_unflatten
        found.update(dict.fromkeys(node.all_input_nodes if is_container else (node,)))
    return list(found)


def _are_alike(node: Node, source: Node) -> bool:
    one, other = node.meta.get("val"), source.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    # As text: comparing symbolic sizes would note that they are equal.
    told = [(t.dtype, t.device, t.layout, str(t.shape), str(t.stride())) for t in (one, other)]
    return told[0] == told[1]


@dataclass(frozen=True, slots=True, eq=False)
class GivenBack:
    """Checks that a call returned what it was given, where it did so when it was recorded.

    Attributes:
        name: The name of what is called.
        argument: The name of the node of the caller's graph that it was given.
        where: Which of its results it is.
    """

    name: str
    argument: str
    where: str

    @property
    def texts(self) -> tuple[str, ...]:
        """What is compared with the result, as the code has it."""
        return (f"{{{self.argument}}}",)

    def names(self) -> Iterator[str]:
        """Yield the names of the nodes that are compared with it."""
        yield self.argument

    def check(self, _: torch.nn.Module, value: Any, argument: Any) -> None:
        """Check a result.

        Args:
            value: The result.
            argument: What the call was given.

        Raises:
            UnflattenError: They are two.
        """
        must_hand_through(value, argument, self.name, self.where)
