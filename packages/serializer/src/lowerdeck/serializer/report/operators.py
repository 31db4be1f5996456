"""The operators inside a payload of XNNPACK, the one backend whose payloads we can read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowerdeck.serializer.errors import FormatError
from lowerdeck.serializer.xnnpack.graph import XnnGraph, XnnNode, XnnQuantization, XnnValue
from lowerdeck.serializer.xnnpack.payload import decode_payload

_MOST_NODES = 400
_MOST_SIZES = 6
_MAGIC = (b"XH00", b"XN00", b"XN01")


@dataclass(frozen=True, slots=True)
class Contents:
    """What is told of a payload.

    Attributes:
        operators: How often it has each operator, the most frequent first.
        constant_bytes: Bytes of its constants, wherever they lie, each once.
        lines: The first nodes in order, each with what it takes and makes: types, sizes, scales,
            bytes of constants.
        links: For each line where it takes from: the number of an earlier line, or -1 - n for
            argument n of the delegate.
        results: For numbers of arguments the line that makes them.
        left_out: How many nodes have no line.
    """

    operators: dict[str, int]
    constant_bytes: int
    lines: tuple[str, ...]
    links: tuple[tuple[int, ...], ...]
    results: dict[int, int]
    left_out: int


def contents_of(blob: memoryview) -> Contents | None:
    """Return what an XNNPACK graph holds.

    Args:
        blob: The bytes of a delegate of any backend.

    Returns:
        The contents; None if the blob is not XNNPACK's or is broken, for who looks at a file must
        not fail on a blob. What is wrong with it is for ``verify`` to say.
    """
    if bytes(blob[4:8]) not in _MAGIC:
        return None
    try:
        graph = decode_payload(blob)
    except FormatError:
        return None
    counts = Counter(node.operator.label for node in graph.nodes)
    shown = graph.nodes[:_MOST_NODES]
    wanted = {one for node in shown for one in (*node.inputs, *node.outputs)}
    # Each once: a value with a million scales may be read by every node.
    texts = {value.id: _described(value) for value in graph.values if value.id in wanted}
    links, results = _flow(graph, shown)
    return Contents(
        dict(counts.most_common()),
        _constant_bytes(graph),
        tuple(_line(node, texts) for node in shown),
        links,
        results,
        len(graph.nodes) - len(shown),
    )


def _flow(
    graph: XnnGraph, shown: Sequence[XnnNode]
) -> tuple[tuple[tuple[int, ...], ...], dict[int, int]]:
    """Return the links between nodes, and which node makes which argument of the delegate."""
    arguments = {
        value.id: value.external_id for value in graph.values if value.external_id is not None
    }
    # Where a value is from so far; of a broken payload a node may read what comes after it.
    source = {one: -1 - position for one, position in arguments.items()}
    links, results = [], {}
    for number, node in enumerate(shown):
        links.append(tuple(dict.fromkeys(source[one] for one in node.inputs if one in source)))
        for one in node.outputs:
            source[one] = number
            if one in arguments:
                results[arguments[one]] = number
    return tuple(links), results


def _constant_bytes(graph: XnnGraph) -> int:
    # One that two values share is one entry, under a key or at a place of the payload.
    return sum({(one.key or one.offset): one.size for one in graph.constants}.values())


def _line(node: XnnNode, texts: Mapping[int, str]) -> str:
    taken, made = (
        ", ".join(texts.get(one, "?") for one in ids) for ids in (node.inputs, node.outputs)
    )
    limits = "" if node.output_range is None else f", limits {_span(*node.output_range)}"
    return f"{node.operator.label}({taken}) -> {made}{limits}"


def _described(value: XnnValue) -> str:
    sizes = ", ".join(map(str, value.shape[:_MOST_SIZES]))
    more = ", ..." if len(value.shape) > _MOST_SIZES else ""
    constant = "" if value.constant is None else f" constant of {value.constant.size} B"
    scales = "" if value.quantization is None else f" {_scales(value.quantization)}"
    return f"{value.dtype.name.lower()}[{sizes}{more}]{scales}{constant}"


def _scales(how: XnnQuantization) -> str:
    if how.scheme == "token":
        return "scales found at run time"
    if how.scheme == "tensor":
        return f"scale {how.scales[0]:.6g} zero {how.zero_point}"
    which = "channel" if how.scheme == "channel" else f"{how.group_size}"
    # Scales that lie in the file's named data are not in the payload.
    found = f" {_span(min(how.scales), max(how.scales))}" if how.scales else ""
    return f"scales{found} for each {which}"


def _span(low: float, high: float) -> str:
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
