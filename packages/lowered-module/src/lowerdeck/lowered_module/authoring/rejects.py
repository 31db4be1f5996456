"""Reasons why nodes are not delegated, stored in their metadata."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch.fx import Graph, Node

from lowerdeck.lowered_module.program.tags import REJECT, REMARKS
from lowerdeck.torch_base import OpOverload


class WhyNoPartition:
    """Log why a node is not delegated, and store the reason in its metadata.

    Args:
        logger: Logger for the reasons, at level debug.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger
        self.node: Node | None = None
        self.reason: str = ""

    def __call__(self, node: Node, reason: str) -> None:
        """Record why ``node`` is not delegated."""
        self.node, self.reason = node, reason
        node.meta.setdefault(REJECT, reason)
        self.logger.debug(str(self))

    def __str__(self) -> str:
        return f"WhyNoPartition: Node {self.node} was not partitioned because {self.reason}."


class WhyNoPartitionReporter:
    """Collect the first reason why each node is not delegated.

    Example:
        >>> reporter = WhyNoPartitionReporter()
        >>> graph = __import__("torch").fx.Graph()
        >>> reporter.report_reject(graph.placeholder("x"), "it is an input")
        >>> print(reporter.get_table_report())
        node | operator    | reason
        -----+-------------+---------------
        x    | placeholder | it is an input
    """

    def __init__(self) -> None:
        self._reasons: dict[Node, str] = {}

    @property
    def reasons(self) -> Mapping[Node, str]:
        """The reason for each node, in the order of reporting."""
        return dict(self._reasons)

    def report_reject(self, node: Node, reason: str) -> None:
        """Record why ``node`` is not delegated.

        Args:
            reason: The reason, as the end of a sentence.
        """
        self._reasons.setdefault(node, reason)
        node.meta.setdefault(REJECT, reason)

    def get_table_report(self) -> str:
        """Return the reasons as a table."""
        rows = [(node.name, operator_name(node), why) for node, why in self._reasons.items()]
        return table(("node", "operator", "reason"), rows)


def keep_reasons(graph: Graph, refused: object) -> None:
    """Store a partitioner's reasons in the metadata of the refused nodes, in place.

    Summaries and pictures of the lowered program then show them without the partitioner.

    Args:
        graph: The graph that was partitioned.
        refused: Reasons by node name; anything but a mapping is ignored.
    """
    if not isinstance(refused, Mapping):
        return
    for node in graph.nodes:
        why, before = refused.get(node.name), node.meta.get(REJECT)
        if why is not None and before is None:
            node.meta[REJECT] = why
        elif why is not None and why not in before:
            # Another partitioner was called first, and gave its own reason.
            node.meta[REJECT] = f"{before}; {why}"


def keep_remarks(graph: Graph, remarks: object) -> None:
    """Store a partitioner's remarks in the metadata of delegated nodes, in place.

    Args:
        graph: The graph that was partitioned.
        remarks: Reasons by heading and node name; anything but a mapping is ignored.
    """
    if not isinstance(remarks, Mapping):
        return
    for node in graph.nodes:
        reasons = {key: why[node.name] for key, why in remarks.items() if node.name in why}
        if reasons:
            node.meta[REMARKS] = reasons


def operator_name(node: Node) -> str:
    """Return the name of a node's operator, such as ``aten.add.Tensor``.

    Returns:
        For an operator of torch its name with the overload, as in ``visits``; for another function
        its name, such as ``getitem`` or ``cond``; for other nodes the kind, such as
        ``placeholder``.
    """
    if node.op != "call_function":
        return node.op
    if isinstance(node.target, OpOverload):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return aligned columns as text."""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]

    def line(cells: tuple[str, ...]) -> str:
        return " | ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True)).rstrip()

    return "\n".join([line(heads), "-+-".join("-" * w for w in widths), *map(line, rows)])
