"""An XNNPACK graph as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowerdeck.serializer.xnnpack.operators import XnnDatatype, XnnOperator


@dataclass(frozen=True, slots=True)
class XnnConstant:
    """Where the bytes of a constant are.

    Attributes:
        key: The entry of the file's named data, or None for bytes inside the payload.
        size: Number of bytes.
        offset: Where they begin in ``XnnGraph.constant_data``, if they are inside.
    """

    key: str | None
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class XnnQuantization:
    """How the integers of a value become real numbers.

    Attributes:
        scheme: ``"tensor"``, ``"channel"``, ``"group"`` or ``"token"`` (found at run time).
        scales: The scales that are written in the graph; one for ``"tensor"``.
        zero_point: The integer that stands for 0; only a ``"tensor"`` has another than 0.
        channel_dim: Dimension of the channels of ``"channel"`` and ``"group"``.
        group_size: Elements that share one scale of a ``"group"``.
        nonbatch_dims: How many of the last dimensions share one scale of a ``"token"``.
        scale_constant: Where the scales are if the graph does not hold them: float32 numbers of
            a ``"channel"``, bfloat16 ones of a ``"group"``.
    """

    scheme: str
    scales: tuple[float, ...] = ()
    zero_point: int = 0
    channel_dim: int = 0
    group_size: int = 0
    nonbatch_dims: int = 0
    scale_constant: XnnConstant | None = None


@dataclass(frozen=True, slots=True)
class XnnValue:
    """One tensor of a graph.

    Attributes:
        id: Its number; nodes refer to it.
        dtype: Type of its elements.
        shape: Sizes in the order of memory; bounds only, or 0 for what varies, unless it is a
            constant.
        flags: 1 for an input of the graph, 2 for an output.
        external_id: Position among the arguments of the delegate call, None if it is none.
        constant: Where its bytes are, if it is a constant.
        quantization: Its scales, None if it has none.
        dynamic_dtype: The type that older compilers gave an input that is quantised at run time.
    """

    id: int
    dtype: XnnDatatype
    shape: tuple[int, ...]
    flags: int = 0
    external_id: int | None = None
    constant: XnnConstant | None = None
    quantization: XnnQuantization | None = None
    dynamic_dtype: int = 0


@dataclass(frozen=True, slots=True)
class XnnNode:
    """One operation of a graph.

    Attributes:
        operator: What it computes; ``operator.label`` is its name.
        inputs: Ids of the values that it reads, in order; a bias or mask that is left out is not
            among them.
        outputs: Ids of the values that it makes.
        parameters: All other fields by name: numbers and tuples of numbers.
        output_range: Smallest and largest output, where the node clamps its output.
        debug_handle: What the runtime's log calls it.
    """

    operator: XnnOperator
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    parameters: Mapping[str, int | float | tuple[int, ...]]
    output_range: tuple[float, float] | None = None
    debug_handle: int = 0


@dataclass(frozen=True, slots=True)
class XnnGraph:
    """A whole payload.

    Attributes:
        version: The compiler's text; the runtime does not look at it.
        values: All tensors.
        nodes: All operations.
        input_ids: Ids of the inputs; the runtime goes by the values' flags instead.
        output_ids: Ids of the outputs, likewise.
        num_externs: Number of arguments that the graph declares.
        constants: Data of constants; entry 0 is reserved and means none.
        constant_data: The payload's own bytes of constants, empty where all have names.
    """

    version: str
    values: tuple[XnnValue, ...]
    nodes: tuple[XnnNode, ...]
    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    num_externs: int
    constants: tuple[XnnConstant, ...]
    constant_data: memoryview
