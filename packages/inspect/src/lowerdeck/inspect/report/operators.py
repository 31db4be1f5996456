"""The operators inside payloads of XNNPACK and of backends with an installed reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, cast

from lowerdeck.inspect.installed import installed_entries
from lowerdeck.inspect.report.embed import clip
from lowerdeck.inspect.report.payloads import (
    PayloadGraph,
    PayloadNode,
    PayloadValue,
    is_xnnpack,
    xnnpack_graph,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

XNNPACK = "XnnpackBackend"
PAYLOADS = "lowerdeck.payloads"
"""Entry-point group of functions that read payloads, by backend id."""

_MOST_NODES = 400
_MOST_SIZES = 6
_MOST_VALUES = 12
_LONGEST = 60
_OPENED_BY = {"OpenvinoBackend": "lowerdeck-openvino"}


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a payload.

    Attributes:
        operators: Number of nodes of each operator, the most frequent first.
        constant_bytes: Bytes of distinct constants.
        lines: The first nodes in order, with the types, sizes, scales and constant bytes of their
            inputs and outputs.
        links: The sources of each line's inputs: the index of an earlier line, or -1 - n for
            argument n of the delegate.
        results: The line that produces each output argument, by argument index.
        left_out: Number of nodes without a line.
        closed: Why the payload is not shown, else "".
        needs: The oldest release of ExecuTorch that loads the payload, and the reason; None if
            1.4 loads it.
    """

    operators: dict[str, int] = field(default_factory=dict)
    constant_bytes: int = 0
    lines: tuple[str, ...] = ()
    links: tuple[tuple[int, ...], ...] = ()
    results: dict[int, int] = field(default_factory=dict)
    left_out: int = 0
    closed: str = ""
    needs: tuple[str, str] | None = None


def contents_of(blob: memoryview, backend: str = XNNPACK) -> Contents:
    """Return the contents of a payload.

    Args:
        blob: The bytes of a delegate.
        backend: Id of the delegate's backend.

    Returns:
        The contents, or why they are not shown: a report must not fail on a malformed blob or an
        unknown backend.
    """
    opener = _opener(backend)
    if opener is None and is_xnnpack(blob):
        opener = xnnpack_graph
    if opener is None:
        who = _OPENED_BY.get(backend)
        cure = f": pip install {who}" if who else ""
        return Contents(closed=f"no installed package opens payloads of {clip(backend)}{cure}")
    try:
        return _contents(opener(blob))
    except Exception as error:
        return Contents(closed=clip(f"{type(error).__name__}: {error}"))


@cache
def _openers() -> dict[str, EntryPoint]:
    # Cached: a file may name a new backend in each of a thousand delegates.
    return {entry.name: entry for entry in installed_entries(PAYLOADS)}


def _opener(backend: str) -> Callable[[memoryview], PayloadGraph] | None:
    if backend == XNNPACK:
        return xnnpack_graph
    entry = _openers().get(backend)
    if entry is None:
        return None

    def open_payload(blob: memoryview) -> PayloadGraph:
        return cast("PayloadGraph", entry.load()(blob))

    return open_payload


def _contents(graph: PayloadGraph) -> Contents:
    counts = Counter(_named(node.operator) for node in graph.nodes)
    for name, times in graph.nested.items():
        counts[_named(name)] += times
    nodes = graph.nodes[:_MOST_NODES]
    ids = {number for node in nodes for number in (*node.inputs, *node.outputs)}
    texts = {number: _described(graph.values[number]) for number in ids if number in graph.values}
    links, results = _flow(graph.arguments, nodes)
    return Contents(
        dict(counts.most_common()),
        graph.constant_bytes,
        tuple(_line(node, texts) for node in nodes),
        links,
        results,
        len(graph.nodes) - len(nodes),
        needs=graph.needs,
    )


def _flow(
    arguments: Mapping[int, int], nodes: Sequence[PayloadNode]
) -> tuple[tuple[tuple[int, ...], ...], dict[int, int]]:
    """Return the links between nodes, and the node that produces each output of the delegate."""
    # Producers so far; in an invalid payload a node may read the output of a later node.
    source: dict[int, int] = {}
    for position, value in arguments.items():
        source.setdefault(value, -1 - position)
    links = []
    for number, node in enumerate(nodes):
        origins = [source[value] for value in node.inputs if value in source]
        links.append(tuple(dict.fromkeys(origins)))
        source.update(dict.fromkeys(node.outputs, number))
    producers = {position: source[value] for position, value in arguments.items()}
    return tuple(links), {position: line for position, line in producers.items() if line >= 0}


def _line(node: PayloadNode, texts: Mapping[int, str]) -> str:
    inputs, outputs = (_listed(ids, texts) for ids in (node.inputs, node.outputs))
    detail = f", {clip(node.detail)}" if node.detail else ""
    return f"{_named(node.operator)}({inputs}) -> {outputs}{detail}"


def _listed(ids: Sequence[int], texts: Mapping[int, str]) -> str:
    listed = [texts.get(number, "?") for number in ids[:_MOST_VALUES]]
    more = len(ids) - len(listed)
    return ", ".join([*listed, f"... and {more} more"] if more else listed)


def _named(name: str) -> str:
    # The name may come from the file.
    return clip(name, _LONGEST)


def _described(value: PayloadValue) -> str:
    sizes = ", ".join(_named(str(size)) for size in value.shape[:_MOST_SIZES])
    more = ", ..." if len(value.shape) > _MOST_SIZES else ""
    constant = "" if value.constant_bytes is None else f" constant of {value.constant_bytes} B"
    detail = f" {clip(value.detail)}" if value.detail else ""
    return f"{_named(value.dtype)}[{sizes}{more}]{detail}{constant}"
