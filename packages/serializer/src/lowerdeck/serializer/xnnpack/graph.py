"""An XNNPACK graph as plain data, for reading, writing and checking payloads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from lowerdeck.serializer.xnnpack.operators import XnnDatatype, XnnOperator


@dataclass(frozen=True, slots=True)
class XnnConstant:
    """Place of the bytes of a constant.

    Attributes:
        key: The entry of the file's named data, or None for bytes inside the payload.
        offset: Where they begin in ``XnnGraph.constant_data``, if they are inside.
    """

    key: str | None
    size: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class XnnEncoding:
    """The type of a value's elements, and how integers become real numbers.

    Attributes:
        dtype: Type of one element; ``dtype.scheme`` says what shares a scale.
        scales: The scales that are written in the graph; one for ``"tensor"``.
        zero_point: The integer that represents 0; nonzero only for ``"tensor"``.
        channel_dim: Dimension of memory of the channels of ``"channel"`` and ``"group"``.
        group_size: Elements that share one scale of a ``"group"``.
        nonbatch_dims: How many of the last dimensions share one scale of a ``"token"``.
        scale_constant: Where the scales are if the graph does not hold them: float32 numbers of
            a ``"channel"``, bfloat16 ones of a ``"group"``.
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
        """What shares a scale, as :attr:`XnnDatatype.scheme` has it."""
        return self.dtype.scheme

    @property
    def scale(self) -> float:
        """The distance of two neighbouring integers, where one holds for the whole tensor."""
        return self.scales[0] if self.scales else 0.0

    @property
    def is_int8(self) -> bool:
        """Whether it is an 8-bit integer with one scale, known ahead of time."""
        return self.dtype is XnnDatatype.QINT8


@dataclass(slots=True)
class XnnValue:
    """One tensor of a graph.

    Attributes:
        id: Its number; nodes refer to it.
        encoding: What its elements are.
        shape: Sizes in the order of memory; bounds only, or 0 for what varies, unless it is a
            constant.
        flags: ``INPUT`` or ``OUTPUT`` of the graph, or 0.
        external_id: Position among the arguments of the delegate call, None if it is none.
        constant: Where its bytes are, if it is a constant.
        dynamic_dtype: The type that older compilers gave an input that is quantised at run time.
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
        """Type of its elements."""
        return self.encoding.dtype


@dataclass(frozen=True, slots=True)
class XnnNode:
    """One operation of a graph.

    Attributes:
        operator: What it computes; ``operator.label`` is its name.
        fields: The fields of its table by name; those left out are 0.
        output_range: Smallest and largest output, where the node clamps its output.
        debug_handle: What the runtime's log calls it.
    """

    NONE: ClassVar[int] = 0xFFFFFFFF
    """The id that means 'no value'."""
    # Flags of operators.
    TRANSPOSE_WEIGHTS: ClassVar[int] = 1
    SAME_PADDING: ClassVar[int] = 4
    """Pads by itself, as TensorFlow's SAME does."""
    ALIGN_CORNERS: ClassVar[int] = 8
    KEEP_DIMS: ClassVar[int] = 0x40
    FLOAT_BIAS: ClassVar[int] = 0x80
    """The bias of a layer with a filter of halves is float32."""

    operator: XnnOperator
    fields: Mapping[str, int | float | tuple[int, ...]]
    output_range: tuple[float, float] | None = None
    debug_handle: int = 0

    @property
    def inputs(self) -> tuple[int, ...]:
        """Ids of the values that it reads, in order, without a bias or mask that is left out."""
        ids: list[Any] = [self.fields.get(name, 0) for name in _INPUTS[self.operator]]
        return tuple(ids[:-1] if ids[-1] == self.NONE and self.operator in _MAY_END else ids)

    @property
    def outputs(self) -> tuple[int, ...]:
        """Ids of the values that it makes."""
        ids: list[Any] = [self.fields.get(name, 0) for name in _OUTPUTS[self.operator]]
        return tuple(ids)

    @property
    def parameters(self) -> dict[str, int | float | tuple[int, ...]]:
        """All fields that are not ids, by name: numbers and tuples of numbers."""
        return {name: value for name, value in self.fields.items() if not name.endswith("_id")}

    def number(self, name: str) -> int:
        """Return a field that is an integer, such as the id of a value; 0 if it has none."""
        value = self.fields.get(name, 0)
        assert isinstance(value, int)
        return value

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return a field that is a list of integers, such as offsets."""
        value: Any = self.fields[name]
        return value  # type: ignore[no-any-return]

    def reading(self, others: Mapping[int, int]) -> XnnNode:
        """Return the node with other values in place of some.

        Args:
            others: Ids by those that they replace; results are replaced as well.
        """
        fields: dict[str, Any] = dict(self.fields)
        for name in _IDS[self.operator]:
            if name in fields:
                fields[name] = others.get(fields[name], fields[name])
        return replace(self, fields=fields)


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
"""The operators whose last input may be left out."""


@dataclass(slots=True)
class XnnGraph:
    """A whole payload.

    Attributes:
        version: The compiler's text; the runtime does not look at it.
        input_ids: Ids of the inputs; the runtime goes by the values' flags instead.
        output_ids: Ids of the outputs, likewise.
        num_externs: Number of arguments that the graph declares.
        constants: Data of constants; entry 0 is reserved and means none.
        constant_data: The payload's own bytes of constants, empty where all have names.
    """

    MAX_RANK: ClassVar[int] = 6
    """The runtime refuses values of more dimensions."""

    version: str = "0"
    values: list[XnnValue] = field(default_factory=list)
    nodes: list[XnnNode] = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    num_externs: int = 0
    constants: list[XnnConstant] = field(default_factory=lambda: [XnnConstant(None, 0)])
    constant_data: memoryview = field(default_factory=lambda: memoryview(b""))
