"""Calls with a signature: their arguments and results as nodes of the working graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from lowerdeck.unflatten.call_signature import CallSignature


@dataclass(frozen=True, slots=True)
class Absent:
    """An argument or a result that the program dropped, because nothing reads it."""


Leaf = Node | Absent | None | bool | int | float | str
"""An argument or result: a node of the working graph, or a constant."""


@dataclass(frozen=True, slots=True)
class PreservedCall:
    """One call with a signature.

    Attributes:
        signature: Its structure.
        inputs: Each leaf of the arguments.
        outputs: Each leaf of the result.
    """

    signature: CallSignature
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]

    def nodes(self, leaves: Sequence[Leaf]) -> list[Node]:
        """Return the distinct nodes among ``leaves``."""
        return list(dict.fromkeys([leaf for leaf in leaves if isinstance(leaf, Node)]))
