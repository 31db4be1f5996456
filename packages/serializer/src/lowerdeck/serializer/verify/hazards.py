"""XNNPACK delegates that need external data or a newer runtime, or that may abort 1.4.1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass

from lowerdeck.serializer.xnnpack.graph import XnnGraph, XnnNode
from lowerdeck.serializer.xnnpack.operators import XnnOperator
from lowerdeck.serializer.xnnpack.releases import needed_release


@dataclass(frozen=True, slots=True)
class Hazard:
    """A delegate in a valid file that may abort the runtime at load, or that 1.4 rejects.

    Attributes:
        reason: Description of the missing data, of the nodes, or of the required release.
        field: Path of the delegate, such as ``method 'forward'.delegates[0]``.
        offset: Offset of the delegate in the file.
        needs: Keys of data that another file must provide; otherwise the process aborts.
        release: The oldest release of ExecuTorch that loads the file, "" if 1.4 does.
    """

    reason: str
    field: str
    offset: int
    needs: tuple[str, ...] = ()
    release: str = ""

    def __str__(self) -> str:
        """Return the hazard formatted like this package's errors."""
        return f"{self.field} at byte {self.offset}: {self.reason}"


def hazards_of(
    payload: XnnGraph, named: Container[str], field: str, offset: int
) -> Iterator[Hazard]:
    """Yield the hazards of an XNNPACK delegate.

    Args:
        named: Keys of the file's named data. The runtime looks up all other keys in `.ptd` files
            at load and aborts if one is missing.
        offset: Offset of the delegate in the file.
    """
    keys = [
        constant.key
        for constant in payload.constants
        if constant.key and constant.key not in named
    ]
    needs = tuple(dict.fromkeys(keys))
    if needs:
        more = f" and {len(needs) - 1} more" if len(needs) > 1 else ""
        reason = f"needs the data {needs[0]!r}{more} from a .ptd file, or the process aborts"
        yield Hazard(reason, field, offset, needs)
    node = _mergeable_move(payload)
    if node is not None:
        reason = (
            f"has two {node.operator.label} nodes that are equal, or one of which is the only "
            "user of the other: merging them at load may abort executorch 1.4.1"
        )
        yield Hazard(reason, field, offset)
    needed = needed_release(payload)
    if needed is not None:
        release, feature = needed
        reason = f"needs ExecuTorch {release} or later: 1.4 rejects {feature} at load"
        yield Hazard(reason, field, offset, release=release)


_MOVES = (XnnOperator.STATIC_RESHAPE, XnnOperator.STATIC_SLICE, XnnOperator.STATIC_TRANSPOSE)


def _mergeable_move(graph: XnnGraph) -> XnnNode | None:
    """Return the first move that the runtime may merge with an earlier one, or None.

    Such a move equals an earlier one, or is the only reader of a move of the same kind.
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
