"""Checks of an XNNPACK payload that the runtime lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from math import prod

from lowerdeck.serializer.pte import schema
from lowerdeck.serializer.pte.enums import ScalarType
from lowerdeck.serializer.xnnpack.graph import XnnConstant, XnnEncoding, XnnGraph, XnnValue
from lowerdeck.serializer.xnnpack.operators import XnnDatatype
from lowerdeck.serializer.xnnpack.verify_nodes import NodeVerifier, damaged

_MAX_EXTERNALS = 4096
# The runtime multiplies sizes and allocates memory before it checks the arguments.
_MAX_ELEMENTS = 1 << 31

# Accepted types of the program's tensors; the runtime widens int32 indices in place.
_PROGRAM_TYPES = {
    XnnDatatype.FP32: {ScalarType.FLOAT},
    XnnDatatype.FP16: {ScalarType.HALF},
    XnnDatatype.QINT8: {ScalarType.CHAR},
    XnnDatatype.QUINT8: {ScalarType.BYTE},
    XnnDatatype.INT32: {ScalarType.INT, ScalarType.LONG},
    XnnDatatype.BF16: {ScalarType.BFLOAT16},
}


def verify_payload(graph: XnnGraph, named: Mapping[str, int]) -> None:
    """Check that the official runtime can load a payload and run it.

    Args:
        named: Size in bytes of each named data entry of the file; other files may provide missing
            ones.

    Raises:
        FormatError: The runtime would crash, hang or compute wrong values; the message says why.
    """
    if graph.num_externs > _MAX_EXTERNALS:
        raise damaged(f"found {graph.num_externs} arguments, expected at most {_MAX_EXTERNALS}")
    values: dict[int, XnnValue] = {}
    arguments: set[int] = set()
    for value in graph.values:
        if value.id in values:
            raise damaged(f"found two XNNPACK values with the id {value.id}, expected one")
        if value.external_id is not None and value.external_id in arguments:
            raise damaged(f"found two XNNPACK values for argument {value.external_id}")
        values[value.id] = value
        if value.external_id is not None:
            arguments.add(value.external_id)
        _verify_value(graph, value, named)
    NodeVerifier(graph, values).verify()
    _verify_order(graph, values)


def verify_call(graph: XnnGraph, tensors: Sequence[schema.KernelTypes]) -> None:
    """Check the arguments of one call of a payload.

    Args:
        tensors: The arguments of the call, inputs and then outputs.

    Raises:
        FormatError: An argument is missing, is no tensor, or has an unsupported dtype or rank.
    """
    if len(tensors) < graph.num_externs:
        raise damaged(
            f"found {len(tensors)} arguments of an XNNPACK delegate, expected {graph.num_externs}"
        )
    for value in graph.values:
        position = value.external_id
        if position is None:
            continue
        tensor = tensors[position]
        if not isinstance(tensor, schema.Tensor):
            kind = type(tensor).__name__
            raise damaged(f"found a {kind} as argument {position}, expected a Tensor")
        accepted = _PROGRAM_TYPES.get(value.dtype, set())
        if value.dtype is XnnDatatype.QINT8 and value.flags == XnnValue.INPUT:
            accepted = {*accepted, ScalarType.BOOL}  # bytes of 0 and 1
        if tensor.scalar_type not in accepted:
            names = " or ".join(sorted(kind.name for kind in accepted)) or "no tensor"
            raise damaged(
                f"found {tensor.scalar_type.name} as argument {position} of an XNNPACK "
                f"delegate, expected {names}"
            )
        if len(tensor.sizes) > XnnGraph.MAX_RANK:
            raise damaged(
                f"found {len(tensor.sizes)} dimensions in argument {position}, expected at "
                f"most {XnnGraph.MAX_RANK}"
            )


def _verify_value(graph: XnnGraph, value: XnnValue, named: Mapping[str, int]) -> None:
    label = f"XNNPACK value {value.id}"
    if len(value.shape) > XnnGraph.MAX_RANK:
        raise damaged(
            f"found {len(value.shape)} dimensions of {label}, expected at most {XnnGraph.MAX_RANK}"
        )
    if value.flags not in (0, XnnValue.INPUT, XnnValue.OUTPUT):
        raise damaged(f"found the flags {value.flags} of {label}, expected 0, 1 or 2")
    if bool(value.flags) != (value.external_id is not None):
        raise damaged(f"found {label}, whose flags and external id disagree")
    if value.external_id is not None and value.external_id >= graph.num_externs:
        raise damaged(f"found {label} as argument {value.external_id} of {graph.num_externs}")
    elements = prod(value.shape)
    if max((elements, *value.shape)) >= _MAX_ELEMENTS:
        raise damaged(f"found the sizes {value.shape} of {label}, expected below 2**31 elements")
    if value.constant:
        needed = (elements * value.dtype.bits + 7) // 8
        _verify_constant(graph, value.constant, needed, label, named)
    if value.encoding.scheme in ("channel", "group") and value.shape:
        _verify_scales(graph, value, value.encoding, named)


def _verify_scales(
    graph: XnnGraph, value: XnnValue, scales: XnnEncoding, named: Mapping[str, int]
) -> None:
    label = f"XNNPACK value {value.id}"
    if not 0 <= scales.channel_dim < len(value.shape):
        raise damaged(
            f"found channel dimension {scales.channel_dim} of {label}, expected 0 to "
            f"{len(value.shape) - 1}"
        )
    count, width = value.shape[scales.channel_dim], 4
    if scales.scheme == "group":
        if scales.group_size < 1:
            raise damaged(f"found group size {scales.group_size} of {label}, expected 1 or more")
        count, width = prod(value.shape) // scales.group_size, 2
    if scales.scale_constant:
        _verify_constant(
            graph, scales.scale_constant, count * width, f"the scales of {label}", named
        )
    elif len(scales.scales) < count:
        raise damaged(f"found {len(scales.scales)} scales of {label}, expected {count}")


def _verify_constant(
    graph: XnnGraph, constant: XnnConstant, needed: int, label: str, named: Mapping[str, int]
) -> None:
    if constant.key is None:
        inside = len(graph.constant_data)
        if constant.offset + max(constant.size, needed) > inside:
            raise damaged(
                f"found {inside} bytes of constant data, expected "
                f"{max(constant.size, needed)} for {label} at offset "
                f"{constant.offset}"
            )
    elif named.get(constant.key, needed) < needed:
        raise damaged(
            f"found {named[constant.key]} bytes of named data for {label}, expected {needed}"
        )


def _verify_order(graph: XnnGraph, values: Mapping[int, XnnValue]) -> None:
    """Raise if a value has no producer or two producers, or is in a cycle."""
    makers: dict[int, int] = {}
    for number, node in enumerate(graph.nodes):
        for result in node.outputs:
            value = values[result]
            if result in makers or value.constant or value.flags == XnnValue.INPUT:
                raise damaged(
                    f"found value {result} as a result of {node.operator.label}, but it is a "
                    "constant, an input or the result of another node"
                )
            makers[result] = number
    for value in graph.values:
        if value.flags == XnnValue.OUTPUT and value.id not in makers:
            raise damaged(f"found the output {value.id}, which no node produces")
    sources: dict[int, set[int]] = {}
    for number, node in enumerate(graph.nodes):
        read = {
            operand
            for operand in node.inputs
            if not values[operand].constant and values[operand].flags != XnnValue.INPUT
        }
        for operand in read - makers.keys():
            raise damaged(
                f"found value {operand} as input of {node.operator.label}, but no node produces it"
            )
        sources[number] = {makers[operand] for operand in read}
    try:
        TopologicalSorter(sources).prepare()
    except CycleError as error:
        raise damaged("found a dependency cycle of nodes") from error
