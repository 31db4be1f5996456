"""The operators inside payloads: XNNPACK's, and those that an installed package opens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, cast

from lowerdeck.inspect.installed import installed_entries
from lowerdeck.inspect.report.embed import clip
from lowerdeck.inspect.report.payloads.graph import PayloadGraph, PayloadNode, PayloadValue
from lowerdeck.inspect.report.payloads.xnnpack import is_xnnpack, xnnpack_graph

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

XNNPACK = "XnnpackBackend"
PAYLOADS = "lowerdeck.payloads"
"""The entry-point group of functions that open payloads, under the ids of their backends."""

_MOST_NODES = 400
_MOST_SIZES = 6
_MOST_VALUES = 12
_LONGEST = 60
_OPENED_BY = {"OpenvinoBackend": "lowerdeck-openvino"}


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a payload.

    Attributes:
        operators: How often it has each operator, the most frequent first.
        constant_bytes: Bytes of its constants, each once.
        lines: The first nodes in order, each with what it takes and makes: types, sizes, scales,
            bytes of constants.
        links: For each line where it takes from: the number of an earlier line, or -1 - n for
            argument n of the delegate.
        results: For numbers of arguments the line that makes them.
        left_out: How many nodes have no line.
        closed: Why nothing is shown; "" if something is.
        needs: The oldest release of ExecuTorch that loads it and why, if 1.4 does not.
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
    """Return what a payload holds.

    Args:
        blob: The bytes of a delegate.
        backend: Id of its backend.

    Returns:
        The contents, or why they are not shown: reporting on a file must not fail on a blob
        that is malformed or of an unknown backend.
    """
    opener = _opener(backend)
    if opener is None and is_xnnpack(blob):
        opener = xnnpack_graph
    if opener is None:
        who = _OPENED_BY.get(backend)
        cure = f" ({who} would)" if who else ""
        return Contents(closed=f"no installed package opens payloads of {clip(backend)}{cure}")
    try:
        return _contents(opener(blob))
    except Exception as error:
        return Contents(closed=clip(f"{type(error).__name__}: {error}"))


@cache
def _openers() -> dict[str, EntryPoint]:
    # Once: a file may name a new backend in each of a thousand delegates.
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
    """Return the links between nodes, and which node makes which argument of the delegate."""
    # Where a value is from so far; of a broken payload a node may read what comes after it.
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
    # It may be the file's own word.
    return clip(name, _LONGEST)


def _described(value: PayloadValue) -> str:
    sizes = ", ".join(_named(str(size)) for size in value.shape[:_MOST_SIZES])
    more = ", ..." if len(value.shape) > _MOST_SIZES else ""
    constant = "" if value.constant_bytes is None else f" constant of {value.constant_bytes} B"
    detail = f" {clip(value.detail)}" if value.detail else ""
    return f"{_named(value.dtype)}[{sizes}{more}]{detail}{constant}"
