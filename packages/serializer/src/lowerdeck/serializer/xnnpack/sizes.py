"""Sizes that values have when an XNNPACK graph runs, whatever the payload says of them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from lowerdeck.serializer.xnnpack.graph import XnnNode, XnnValue
from lowerdeck.serializer.xnnpack.operators import XnnOperator

_WINDOWS = {
    XnnOperator.CONV2D: ("kernel", "subsampling"),
    XnnOperator.DEPTHWISE_CONV2D: ("kernel", "subsampling"),
    XnnOperator.MAX_POOLING_2D: ("pooling", "stride"),
    XnnOperator.AVG_POOLING_2D: ("pooling", "stride"),
}
_NEVER_MORE = {
    *(XnnOperator.STATIC_RESHAPE, XnnOperator.STATIC_SLICE, XnnOperator.GLOBAL_AVG_POOLING_2D),
    XnnOperator.STATIC_TRANSPOSE,
}
_PRODUCTS = {XnnOperator.FULLY_CONNECTED, XnnOperator.BATCH_MATRIX_MULTIPLY}
_LIKE_INPUT = {"Unary", "Softmax", "LeakyReLU", "ELU"}
_BROADCAST = {
    *(XnnOperator.ADD, XnnOperator.SUBTRACT, XnnOperator.MULTIPLY, XnnOperator.DIV),
    *(XnnOperator.MINIMUM, XnnOperator.MAXIMUM, XnnOperator.PRELU),
}


class RealSizes:
    """Sizes that follow from those of the graph's inputs, node by node.

    The runtime computes them anew for each call; what a payload says of values in between is read
    for its memory alone. Where they do not follow from sizes alone they are taken from there.
    """

    def __init__(self, values: Mapping[int, XnnValue]) -> None:
        """Make it for a graph.

        Args:
            values: Its values by their ids.
        """
        self._values = values
        self._found: dict[int, tuple[int, ...]] = {}

    def of(self, number: int) -> tuple[int, ...]:
        """Return the sizes of a value that the graph is given, or that a node before computed.

        Args:
            number: Its id.
        """
        return self._found.get(number, self._values[number].shape)

    def run(self, node: XnnNode) -> None:
        """Let the next node compute; its fields are verified.

        Args:
            node: The node.
        """
        sizes = self._after(node)
        if sizes is not None:
            self._found[node.outputs[0]] = sizes

    def most(self, node: XnnNode) -> int | None:
        """Return how many elements a node gives at most, None where sizes alone do not tell.

        Args:
            node: A node that was run.
        """
        found = self._found.get(node.outputs[0])
        if found is not None:
            return prod(found)
        given = [self.of(number) for number in node.inputs]
        elements = [prod(sizes) for sizes in given]
        if node.operator in _NEVER_MORE:
            return elements[0]
        if node.operator.table == "Concatenate":
            return sum(elements)
        if node.operator in _PRODUCTS and given[0]:
            # Which side of the second matrix is which, flags tell; the longer one is enough.
            *batches, high, wide = (1, 1, *given[1])
            return prod(given[0][:-1]) * prod(batches) * max(high, wide)
        return None

    def _after(self, node: XnnNode) -> tuple[int, ...] | None:
        given = self.of(node.inputs[0])
        if node.operator is XnnOperator.STATIC_TRANSPOSE:
            order = node.parameters["perm"]
            axes = order[: len(given)] if isinstance(order, tuple) else ()
            fits = sorted(axes) == list(range(len(given)))
            return tuple(given[int(axis)] for axis in axes) if fits else None
        if node.operator is XnnOperator.GLOBAL_AVG_POOLING_2D:
            return None
        if node.operator in _WINDOWS:
            return _slid(node, given, self._values[node.outputs[0]])
        if node.operator in _BROADCAST:
            return _broadcast(given, self.of(node.inputs[1]))
        return given if node.operator.table in _LIKE_INPUT else None


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(len(one), len(other))
    one = (1,) * (rank - len(one)) + one
    other = (1,) * (rank - len(other)) + other
    return tuple(max(pair) if 0 not in pair else 0 for pair in zip(one, other, strict=True))


def _slid(node: XnnNode, given: tuple[int, ...], result: XnnValue) -> tuple[int, ...] | None:
    """Return the sizes of what a window gives, [batch, height, width, channels]."""
    if len(given) != 4 or len(result.shape) != 4:
        return None
    kind, step = _WINDOWS[node.operator]

    def number(name: str) -> int:
        found = node.parameters.get(name, 0)
        return found if isinstance(found, int) else 0

    def length(size: int, axis: str, before: str, after: str) -> int:
        apart = 1 if node.operator is XnnOperator.AVG_POOLING_2D else number(f"dilation_{axis}")
        span = (number(f"{kind}_{axis}") - 1) * apart + 1
        stride = max(1, number(f"{step}_{axis}"))
        if number("flags") & 4:
            return -(-size // stride)
        padded = size + number(f"padding_{before}") + number(f"padding_{after}")
        return max(0, padded - span) // stride + 1

    height = length(given[1], "height", "top", "bottom")
    return (given[0], height, length(given[2], "width", "left", "right"), result.shape[3])
