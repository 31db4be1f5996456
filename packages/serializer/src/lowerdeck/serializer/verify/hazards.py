"""Delegates that the official runtime runs only with other data or in a newer release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass

from lowerdeck.serializer.xnnpack.graph import XnnGraph, XnnNode
from lowerdeck.serializer.xnnpack.operators import XnnOperator
from lowerdeck.serializer.xnnpack.releases import needed_release


@dataclass(frozen=True, slots=True)
class Hazard:
    """A delegate in a valid file that may end the runtime's process when it is loaded.

    Attributes:
        reason: The data that are missing, the nodes or the release.
        offset: Where it is in the file.
        needs: Keys of data that must come with another file, or the process ends.
        release: The oldest release of ExecuTorch that loads the file, if 1.4 does not.
    """

    reason: str
    field: str
    offset: int
    needs: tuple[str, ...] = ()
    release: str = ""

    def __str__(self) -> str:
        """Return it in the form of this package's errors."""
        return f"{self.field} at byte {self.offset}: {self.reason}"


def hazards_of(
    payload: XnnGraph, named: Container[str], field: str, offset: int
) -> Iterator[Hazard]:
    """Yield the hazards of a delegate of XNNPACK.

    Args:
        named: The keys of the file's data. The runtime looks others up when it loads the method,
            and its process ends if one is missing.
        offset: Where it is in the file.
    """
    keys = [
        constant.key
        for constant in payload.constants
        if constant.key and constant.key not in named
    ]
    needs = tuple(dict.fromkeys(keys))
    if needs:
        more = f" and {len(needs) - 1} more" if len(needs) > 1 else ""
        reason = (
            f"needs the data {needs[0]!r}{more} from a .ptd file, without which the process ends"
        )
        yield Hazard(reason, field, offset, needs)
    node = _mergeable_move(payload)
    if node is not None:
        reason = (
            f"has two {node.operator.label} nodes of which one reads the other alone, or that are "
            "equal: merging them at load may end the process of executorch 1.4.1"
        )
        yield Hazard(reason, field, offset)
    needed = needed_release(payload)
    if needed is not None:
        release, feature = needed
        reason = f"needs ExecuTorch {release} or later: {feature} is refused by 1.4 at load"
        yield Hazard(reason, field, offset, release=release)


_MOVES = (XnnOperator.STATIC_RESHAPE, XnnOperator.STATIC_SLICE, XnnOperator.STATIC_TRANSPOSE)


def _mergeable_move(graph: XnnGraph) -> XnnNode | None:
    """Return a move of bytes that alone reads a move of its kind, or is equal to one before it.

    Returns:
        The first such node; None where there is none.
    """
    makers = {output: node for node in graph.nodes for output in node.outputs}
    readers = Counter(value for node in graph.nodes for value in node.inputs)
    seen = set()
    for node in graph.nodes:
        if node.operator not in _MOVES:
            continue
        maker = makers.get(node.inputs[0])
        if maker and maker.operator is node.operator and readers[node.inputs[0]] == 1:
            return node
        key = (node.operator, node.inputs, *sorted(node.parameters.items()))
        if key in seen:
            return node
        seen.add(key)
    return None
