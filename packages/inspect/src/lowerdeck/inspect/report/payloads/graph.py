"""Nodes and values of a delegate's payload, for any backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PayloadValue:
    """A value in a payload.

    Attributes:
        shape: Sizes; text for an unknown size.
        constant_bytes: Its size in the payload, None if it is computed.
        detail: Further properties, such as its scale.
    """

    dtype: str
    shape: tuple[int | str, ...]
    constant_bytes: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PayloadNode:
    """An operator in a payload.

    Attributes:
        inputs: Ids of the input values.
        outputs: Ids of the output values.
        detail: Further properties, such as output limits.
    """

    operator: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PayloadGraph:
    """Nodes and values of a payload, returned by entry points of ``lowerdeck.payloads``.

    Attributes:
        nodes: Nodes in execution order.
        arguments: Value ids by argument index of the delegate, inputs before outputs.
        constant_bytes: Bytes of all distinct constants.
        nested: Number of each operator inside the bodies of loops and branches.
        needs: The oldest release of ExecuTorch that loads the payload and why, if 1.4 does not.
    """

    nodes: tuple[PayloadNode, ...]
    values: Mapping[int, PayloadValue]
    arguments: Mapping[int, int]
    constant_bytes: int
    nested: Mapping[str, int] = field(default_factory=dict)
    needs: tuple[str, str] | None = None
