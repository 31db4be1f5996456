"""A payload while it grows, as plain data; the serializer has the format and reads it back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from lowerdeck.serializer import XnnOperator
from lowerdeck.xnnpack.payload.encoding import FLOAT, Encoding

NONE = 0xFFFFFFFF
"""The id that stands for 'no value'."""
EXTERNAL_INPUT = 1
EXTERNAL_OUTPUT = 2
TRANSPOSE_WEIGHTS = 1
ALIGN_CORNERS = 8
KEEP_DIMS = 0x40
MAX_RANK = 6


NodeKind: TypeAlias = XnnOperator
"""What a node computes."""

CONCATENATE_KINDS = (
    *(NodeKind.CONCATENATE2, NodeKind.CONCATENATE3),
    *(NodeKind.CONCATENATE4, NodeKind.CONCATENATE5),
)
"""The kinds that join 2, 3, 4 and 5 inputs, in that order."""


@dataclass(slots=True)
class Value:
    """One tensor of the graph.

    Attributes:
        id: Its number; nodes refer to it.
        dims: Sizes in the order of memory, 0 for what varies; hints only, unless the value is a
            constant or given by the program.
        constant: Number of its data in ``Graph.constants``, or 0 for none.
        external_id: Position among the arguments of the delegate call, or ``NONE``.
        flags: ``EXTERNAL_INPUT`` or ``EXTERNAL_OUTPUT`` or 0.
        encoding: What its elements are.
    """

    id: int
    dims: tuple[int, ...]
    constant: int = 0
    external_id: int = NONE
    flags: int = 0
    encoding: Encoding = FLOAT


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of the graph.

    Attributes:
        kind: What it computes.
        fields: The fields of its table by name; those left out are 0.
        output_range: Smallest and largest output, where the node clamps its output.
        debug_handle: What the runtime's log calls this node.
    """

    kind: NodeKind
    fields: Mapping[str, int | float | tuple[int, ...]]
    output_range: tuple[float, float] | None = None
    debug_handle: int = 0

    def number(self, name: str) -> int:
        """Return a field that is an integer, such as the id of a value.

        Args:
            name: The field.
        """
        value = self.fields.get(name, 0)
        assert isinstance(value, int)
        return value

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return a field that is a list of integers, such as offsets.

        Args:
            name: The field.
        """
        value: Any = self.fields[name]
        assert isinstance(value, tuple)
        return value


@dataclass(frozen=True, slots=True)
class Constant:
    """Where the bytes of a constant lie.

    Attributes:
        key: The entry of the file's named data; empty for bytes inside the blob.
        size: Number of bytes.
        offset: Where they begin in the blob's constant segment, if they are inside.
    """

    key: str
    size: int
    offset: int = 0


@dataclass(slots=True)
class Graph:
    """A whole payload.

    Attributes:
        values: All tensors.
        nodes: All operations, in an order in which they can run.
        constants: Data of constants; number 0 is reserved and means none.
        input_ids: Ids of the external inputs, in order of the arguments.
        output_ids: Ids of the external outputs, in order of the arguments.
        num_externs: Number of arguments of the delegate call, inputs and outputs together.
        channels_last: Positions of the arguments that the program holds with channels last. The
            official runtime sees it from the program's tensors; for other readers it is in
            the version's text, which the official runtime does not read.
    """

    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=lambda: [Constant("", 0)])
    input_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    num_externs: int = 0
    channels_last: set[int] = field(default_factory=set)
