"""An XNNPACK graph as plain data, for reading, writing and checking payloads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lowerdeck.serializer.xnnpack.operators import XnnDatatype, XnnOperator


@dataclass(frozen=True, slots=True)
class XnnConstant:
    """Location of a constant's bytes.

    Attributes:
        key: The entry of the file's named data, or None for bytes inside the payload.
        size: Number of bytes.
        offset: Offset in ``XnnGraph.constant_data``, for bytes inside the payload.
    """

    key: str | None
    size: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class XnnEncoding:
    """Element type and quantisation parameters of a value.

    Attributes:
        dtype: Element type; ``dtype.scheme`` is the granularity of scales.
        scales: The scales that are stored in the graph; one for ``"tensor"``.
        zero_point: The integer that represents 0; nonzero only for ``"tensor"``.
        channel_dim: Channel dimension, in memory order, for ``"channel"`` and ``"group"``.
        group_size: Elements per scale for ``"group"``.
        nonbatch_dims: Number of last dimensions that share a scale for ``"token"``.
        scale_constant: Location of scales that are not in the graph: float32 for ``"channel"``,
            bfloat16 for ``"group"``.
    """

    dtype: XnnDatatype
    scales: tuple[float, ...] = ()
    zero_point: int = 0
    channel_dim: int = 0
    group_size: int = 0
    nonbatch_dims: int = 0
    scale_constant: XnnConstant | None = None

    @property
    def scheme(self) -> str:
        """Granularity of scales, as in :attr:`XnnDatatype.scheme`."""
        return self.dtype.scheme

    @property
    def scale(self) -> float:
        """The scale of the tensor, or the first of several; 0 if the graph stores none."""
        return self.scales[0] if self.scales else 0.0

    @property
    def is_int8(self) -> bool:
        """Whether the type is int8 with one static scale."""
        return self.dtype is XnnDatatype.QINT8


@dataclass(slots=True)
class XnnValue:
    """One tensor of a graph.

    Attributes:
        id: The id by which nodes refer to the value.
        encoding: Element type and quantisation.
        shape: Sizes in memory order. They are exact for constants; for other values they are upper
            bounds, or 0 for dynamic sizes.
        flags: ``INPUT`` or ``OUTPUT`` of the graph, or 0.
        external_id: Position among the arguments of the delegate call, or None.
        constant: Location of its bytes, if it is a constant.
        dynamic_dtype: Type number that older compilers set for a dynamically quantised input.
    """

    INPUT: ClassVar[int] = 1
    OUTPUT: ClassVar[int] = 2

    id: int
    encoding: XnnEncoding
    shape: tuple[int, ...]
    flags: int = 0
    external_id: int | None = None
    constant: XnnConstant | None = None
    dynamic_dtype: int = 0

    @property
    def dtype(self) -> XnnDatatype:
        """Element type of the value."""
        return self.encoding.dtype


@dataclass(slots=True)  # Not frozen: payloads have thousands, and that takes twice as long.
class XnnNode:
    """One operation of a graph.

    Attributes:
        operator: The operator; ``operator.label`` is its name.
        fields: The fields of its table by name; omitted fields are 0.
        output_range: Smallest and largest output if the node clamps its output, else None.
        debug_handle: Identifier of the node in the runtime's log.
    """

    NONE: ClassVar[int] = 0xFFFFFFFF
    """The id that means 'no value'."""
    # Flags of operators.
    TRANSPOSE_WEIGHTS: ClassVar[int] = 1
    SAME_PADDING: ClassVar[int] = 4
    """Implicit padding, like TensorFlow's SAME."""
    ALIGN_CORNERS: ClassVar[int] = 8
    KEEP_DIMS: ClassVar[int] = 0x40
    FLOAT_BIAS: ClassVar[int] = 0x80
    """A layer with a float16 filter has a float32 bias."""

    operator: XnnOperator
    fields: Mapping[str, int | float | tuple[int, ...]]
    output_range: tuple[float, float] | None = None
    debug_handle: int = 0

    @property
    def inputs(self) -> tuple[int, ...]:
        """Ids of the inputs in order, without an omitted bias or mask."""
        ids: list[Any] = [self.fields.get(name, 0) for name in _INPUTS[self.operator]]
        return tuple(ids[:-1] if ids[-1] == self.NONE and self.operator in _MAY_END else ids)

    @property
    def outputs(self) -> tuple[int, ...]:
        """Ids of the outputs."""
        ids: list[Any] = [self.fields.get(name, 0) for name in _OUTPUTS[self.operator]]
        return tuple(ids)

    @property
    def parameters(self) -> dict[str, int | float | tuple[int, ...]]:
        """All fields that are not ids, by name: numbers and tuples of numbers."""
        return {name: value for name, value in self.fields.items() if not name.endswith("_id")}

    def number(self, name: str) -> int:
        """Return an integer field, such as a value id; 0 if absent."""
        value = self.fields.get(name, 0)
        assert isinstance(value, int)
        return value

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return a field with a list of integers, such as offsets."""
        value: Any = self.fields[name]
        return value  # type: ignore[no-any-return]

    def reading(self, others: Mapping[int, int], debug_handle: int | None = None) -> XnnNode:
        """Return a copy of the node with value ids replaced.

        Args:
            others: New ids by old id, for inputs and outputs.
            debug_handle: Debug handle of the copy; None to keep that of the node.
        """
        fields: dict[str, Any] = dict(self.fields)
        for name in _IDS[self.operator]:
            if name in fields:
                fields[name] = others.get(fields[name], fields[name])
        handle = self.debug_handle if debug_handle is None else debug_handle
        return XnnNode(self.operator, fields, self.output_range, handle)


_IDS = {
    operator: [field.name for field in operator.fields if field.name.endswith("_id")]
    for operator in XnnOperator
}
_OUTPUTS = {
    operator: [name for name in names if name.startswith("output")]
    for operator, names in _IDS.items()
}
_INPUTS = {
    operator: [name for name in names if not name.startswith("output")][: operator.joined or None]
    for operator, names in _IDS.items()
}
_MAY_END = frozenset(
    operator for operator, names in _INPUTS.items() if names[-1] in ("bias_id", "mask_id")
)
"""Operators whose last input is optional."""


@dataclass(slots=True)
class XnnGraph:
    """The graph and constants of a payload.

    Attributes:
        version: Version string of the compiler; the runtime ignores it.
        input_ids: Ids of the inputs; the runtime uses the values' flags instead.
        output_ids: Ids of the outputs; the runtime uses the values' flags instead.
        num_externs: Number of arguments that the graph declares.
        constants: Locations of constants; entry 0 is reserved and means none.
        constant_data: Bytes of constants inside the payload, empty if all are named data.
    """

    MAX_RANK: ClassVar[int] = 6
    """The runtime rejects values with more dimensions."""

    version: str = "0"
    values: list[XnnValue] = field(default_factory=list)
    nodes: list[XnnNode] = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    num_externs: int = 0
    constants: list[XnnConstant] = field(default_factory=lambda: [XnnConstant(None, 0)])
    constant_data: memoryview = field(default_factory=lambda: memoryview(b""))
