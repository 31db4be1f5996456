"""Calls of operators, with arguments by their schema names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.types import IntLikeType as Dim

from lowerdeck.torch_base import OpOverload, expression_of

_DEQUANTIZES = ("quantized_decomposed.dequantize_", "torchao.dequantize_affine")
"""Name prefixes of dequantise operators."""


def named(names: str) -> list[OpOverload]:
    """Return the ATen operators in a text such as ``"add.Tensor relu"``, separated by spaces."""
    pairs = (name.partition(".") for name in names.split())
    return [
        getattr(getattr(torch.ops.aten, name), overload or "default")
        for name, _, overload in pairs
    ]


def fake(node: Node) -> torch.Tensor | None:
    """Return the fake tensor of a node with one tensor result."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def shape_of(node: Node) -> tuple[Dim, ...]:
    """Return the sizes of a node's tensor; symbolic ones stay symbols."""
    return tuple(node.meta["val"].shape)


def is_fixed(size: object) -> bool:
    """Return whether a size is static, without adding a guard."""
    return isinstance(size, int)


def is_one(size: object) -> bool:
    """Return whether a size is statically 1, without adding a guard."""
    return isinstance(size, int) and size == 1


def same_sizes(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Return whether sizes are provably equal, without adding guards."""
    return len(left) == len(right) and all(
        expression_of(a) == expression_of(b) for a, b in zip(left, right, strict=True)
    )


def symbols_refusal(shape: Sequence[Dim]) -> str | None:
    """Return why a reshape, which infers at most one size, cannot produce a shape, or None."""
    if sum(not is_fixed(size) for size in shape) > 1:
        return "it has several symbolic sizes, of which a reshape infers only one"
    return None


def broadcast(left: Sequence[Dim], right: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return the sizes of a broadcast, assuming that sizes other than 1 are equal."""
    rank = max(len(left), len(right))
    wide = [(*(1,) * (rank - len(shape)), *shape) for shape in (left, right)]
    return tuple(b if is_one(a) else a for a, b in zip(*wide, strict=True))


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator, for checks and emission.

    Attributes:
        args: Its arguments by name.
        constants: Names of constant placeholders, and of nodes folded from them.
        limits: Minimum and maximum of a following clamp that is fused into the call.
    """

    node: Node
    args: Mapping[str, Any]
    constants: Collection[str]
    limits: tuple[float, float] | None = None

    @property
    def result(self) -> tuple[Dim, ...]:
        """The sizes of the (first) result."""
        value = self.node.meta["val"]
        return tuple((value[0] if isinstance(value, (list, tuple)) else value).shape)

    @property
    def operand(self) -> str:
        """Name of the first tensor argument: ``self`` or ``input``."""
        return "self" if "self" in self.args else "input"

    def shape(self, name: str = "") -> tuple[Dim, ...]:
        """Return the sizes of a tensor argument, by default the operand."""
        return shape_of(self.args[name or self.operand])

    def rank(self, name: str = "") -> int:
        """Return the rank of a tensor argument, by default the operand."""
        return len(self.shape(name))

    def is_constant(self, name: str) -> bool:
        """Return whether an argument is a constant, a dequantised constant, or None."""
        value = self.args[name]
        if not isinstance(value, Node):
            return value is None
        if value.op == "placeholder" or value.name in self.constants:
            return value.name in self.constants
        return str(value.target).startswith(_DEQUANTIZES) and self.is_weight(value)

    def is_weight(self, node: Node) -> bool:
        """Return whether a node depends only on constants, including dequantised ones."""
        # Iterative: a model may be thousands of nodes deep.
        seen = {node}
        waiting = [node]
        for candidate in waiting:
            sources = candidate.all_input_nodes
            if (
                candidate.name not in self.constants
                if candidate.op == "placeholder"
                else not sources
            ):
                return False
            waiting += [source for source in sources if source not in seen]
            seen.update(sources)
        return True

    def axis(self) -> int:
        """Return the argument ``dim``, counted from the front."""
        return int(self.args["dim"]) % max(self.rank("self"), 1)
