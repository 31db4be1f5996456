"""Summary of delegated and other nodes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from lowerdeck.lowered_module.authoring.rejects import operator_name, table
from lowerdeck.lowered_module.delegate.module import LoweredBackendModule
from lowerdeck.lowered_module.errors import LoweringError
from lowerdeck.lowered_module.inspect.float_weights import FloatWeight, float_weights_of_parts
from lowerdeck.lowered_module.inspect.inspection import delegates_in
from lowerdeck.lowered_module.program.graphs import computing_nodes, nodes_of
from lowerdeck.lowered_module.program.tags import REJECT, REMARKS
from lowerdeck.torch_base import module_path, source_frame

_OF_AN_INPUT = re.compile(r"input (\w+): (.*)")
"""A reason that names the refused input of a node, as partitioners of this package write it."""


@dataclass(frozen=True, slots=True)
class Remark:
    """A partitioner's remark on a delegated node.

    Attributes:
        heading: Kind of the remark, such as ``"computed in float"``.
    """

    heading: str
    operator: str
    node: str
    why: str

    def __str__(self) -> str:
        return f"{self.heading}: {self.operator} at {self.node}: {self.why}"


def counted(count: int, noun: str) -> str:
    """Return a count and its noun, such as ``1 node`` or ``2 nodes``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def size_text(count: int) -> str:
    """Return a number of bytes in decimal units, such as ``2.35 kB``."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"


@dataclass(frozen=True, slots=True)
class RootCause:
    """One reason why nodes are not delegated, and where it begins.

    Attributes:
        start: The node or input whose value is refused, such as an integer input ``tokens``;
            empty if the reason is the operator itself.
        operators: Number of nodes, by operator.
        module: Path of the first node's module, such as ``encoder.layers.0``; empty for the root.
        source: File and line of the model that the first node is from; empty if unknown.
        weight_bytes: Bytes of the weights that these nodes read; 0 for graph modules, whose
            weights are unknown.
    """

    why: str
    start: str
    operators: Mapping[str, int]
    module: str = ""
    source: str = ""
    weight_bytes: int = 0

    @property
    def count(self) -> int:
        """Number of nodes."""
        return sum(self.operators.values())

    def __str__(self) -> str:
        names = ", ".join(
            f"{name.removeprefix('aten.')}{f' ({count})' if count > 1 else ''}"
            for name, count in self.operators.items()
        )
        start = f", from {self.start}" if self.start else ""
        place = ", ".join(filter(None, (self.module, Path(self.source).name)))
        place = f"{', the first' if self.count > 1 else ''} in {place}" if place else ""
        weights = (
            f"; {size_text(self.weight_bytes)} of weights" if self.weight_bytes >= 1000 else ""
        )
        return f"{counted(self.count, 'node')}: {self.why}{start}: {names}{place}{weights}"


@dataclass(frozen=True, slots=True)
class DelegationSummary:
    """Numbers of delegated and other nodes.

    Only nodes that compute tensors count, not assertions and sizes.

    Attributes:
        delegates: Number of delegates, by backend.
        delegate_bytes: Bytes of blobs, by backend.
        delegated: Number of delegated nodes, by operator.
        left: Number of nodes that are not delegated, by operator.
        reasons: Reasons why nodes are not delegated, by operator, if a partitioner gave any.
        remarks: A partitioner's remarks on delegated nodes.
        float_weights: The weights of more than 1 kB that stay float in a quantised program, the
            largest first; empty for graph modules, which hold no weights.
        root_causes: Each distinct reason, in descending order of its number of nodes.
    """

    delegates: Mapping[str, int]
    delegate_bytes: Mapping[str, int]
    delegated: Mapping[str, int]
    left: Mapping[str, int]
    reasons: Mapping[str, tuple[str, ...]]
    remarks: tuple[Remark, ...] = ()
    float_weights: tuple[FloatWeight, ...] = ()
    root_causes: tuple[RootCause, ...] = ()

    @property
    def share(self) -> float:
        """Share of the computing nodes that were delegated, from 0 to 1."""
        delegated, left = sum(self.delegated.values()), sum(self.left.values())
        return delegated / (delegated + left) if delegated + left else 0.0

    def __str__(self) -> str:
        rows = [
            (name, str(self.delegated.get(name, 0)), str(self.left.get(name, 0)))
            for name in sorted({*self.delegated, *self.left})
        ]
        lines = [
            f"{backend}: {counted(count, 'delegate')}, {self.delegate_bytes[backend]} bytes"
            for backend, count in self.delegates.items()
        ]
        delegated, left = sum(self.delegated.values()), sum(self.left.values())
        lines.append(f"{delegated} of {delegated + left} nodes delegated ({self.share:.0%})")
        lines.extend(f"left: {cause}" for cause in self.root_causes)
        heads = ("operator", "delegated", "left")
        notes = map(str, (*self.remarks, *self.float_weights))
        return "\n".join([*lines, table(heads, rows), *notes])


def delegation_summary(
    program: ExportedProgram | GraphModule | Mapping[str, ExportedProgram],
) -> DelegationSummary:
    """Summarise the lowering of ``program``, including nested graphs and delegates.

    Args:
        program: A lowered program, or its graph module, or the programs of several methods.

    Raises:
        LoweringError: ``program`` is another kind of object.
    """
    programs = list(program.values()) if isinstance(program, Mapping) else [program]
    tops = [part.graph_module if isinstance(part, ExportedProgram) else part for part in programs]
    for top in tops:
        if not isinstance(top, GraphModule):
            raise LoweringError(
                f"found a {type(top).__name__}, expected an exported program or its graph module"
            )
    delegates = [delegate for top in tops for delegate in delegates_in(top)]
    count = Counter(delegate.backend_id for delegate in delegates)
    size: Counter[str] = Counter()
    for delegate in delegates:
        size[delegate.backend_id] += len(delegate.processed_bytes)
    left: Counter[str] = Counter()
    reasons: dict[str, dict[str, None]] = {}
    causes: dict[tuple[str, str], list[Node]] = {}
    for node in chain.from_iterable(map(computing_nodes, tops)):
        name = operator_name(node)
        left[name] += 1
        if REJECT in node.meta:
            reasons.setdefault(name, {})[node.meta[REJECT]] = None
            causes.setdefault(_root_cause(node), []).append(node)
    parts = [part for part in programs if isinstance(part, ExportedProgram)]
    weights = set(chain.from_iterable(part.graph_signature.inputs_to_parameters for part in parts))
    return DelegationSummary(
        delegates=dict(count),
        delegate_bytes=dict(size),
        delegated=dict(Counter(map(operator_name, _delegated(delegates)))),
        left=dict(left),
        reasons={name: tuple(texts) for name, texts in reasons.items()},
        remarks=tuple(chain.from_iterable(map(_remarks_in, delegates))),
        float_weights=float_weights_of_parts(
            [*parts, *(delegate.original_module for delegate in delegates)]
        ),
        root_causes=tuple(
            sorted(
                (
                    RootCause(
                        *reason,
                        Counter(map(operator_name, nodes)),
                        module_path(nodes[0]),
                        source_line(nodes[0]),
                        _weight_bytes(nodes, weights),
                    )
                    for reason, nodes in causes.items()
                ),
                key=lambda cause: -cause.count,
            )
        ),
    )


def _root_cause(node: Node) -> tuple[str, str]:
    """Return the reason why a node is not delegated, and the value where its chain begins."""
    match = _OF_AN_INPUT.fullmatch(node.meta[REJECT])
    if match is None:
        return node.meta[REJECT], ""
    start, why = match.groups()
    while producers := [source for source in node.all_input_nodes if source.name == start]:
        (node,) = producers
        match = _OF_AN_INPUT.fullmatch(node.meta.get(REJECT, ""))
        if match is None or match[2] != why:
            break
        start = match[1]
    return why, start


def _weight_bytes(nodes: Iterable[Node], weights: Container[str]) -> int:
    read = {source for node in nodes for source in node.all_input_nodes}
    return sum(source.meta["val"].nbytes for source in read if source.name in weights)


def source_line(node: Node) -> str:
    """Return file and line of the innermost frame outside torch; empty if unknown."""
    frame = source_frame(node)
    return f"{frame.file}:{frame.line}" if frame else ""


def _remarks_in(module: LoweredBackendModule) -> Iterator[Remark]:
    for node in nodes_of(module.original_module.graph_module):
        for heading, why in node.meta.get(REMARKS, {}).items():
            yield Remark(heading, operator_name(node), node.name, why)


def _delegated(delegates: Iterable[LoweredBackendModule]) -> Iterator[Node]:
    """Yield the nodes in delegates, also in nested delegates."""
    for delegate in delegates:
        graph_module = delegate.original_module.graph_module
        yield from computing_nodes(graph_module)
        yield from _delegated(delegates_in(graph_module))
