"""Nodes and values in the payload of a delegate of any backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PayloadValue:
    """A value in a payload.

    Attributes:
        shape: Its sizes, as text where one is not known.
        constant_bytes: How many bytes it takes in the payload, None if it is computed.
        detail: What else there is to say of it, such as its scale.
    """

    dtype: str
    shape: tuple[int | str, ...]
    constant_bytes: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PayloadNode:
    """An operator in a payload.

    Attributes:
        inputs: Ids of the values that it reads.
        outputs: Ids of the values that it makes.
        detail: What else there is to say of it, such as its limits.
    """

    operator: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PayloadGraph:
    """Nodes and values of a payload, as a function of ``lowerdeck.payloads`` returns them.

    Attributes:
        nodes: In the order in which they run.
        arguments: For arguments of the delegate, inputs before outputs, the ids of their values.
        constant_bytes: Bytes of all constants, those that are shared once.
        nested: How often there are which operators inside the bodies of loops and branches.
        needs: The oldest release of ExecuTorch that loads it and why, if 1.4 does not.
    """

    nodes: tuple[PayloadNode, ...]
    values: Mapping[int, PayloadValue]
    arguments: Mapping[int, int]
    constant_bytes: int
    nested: Mapping[str, int] = field(default_factory=dict)
    needs: tuple[str, str] | None = None
