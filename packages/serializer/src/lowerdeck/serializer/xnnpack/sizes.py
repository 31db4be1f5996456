"""Infer the sizes of values in an XNNPACK graph, independent of the declared ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from lowerdeck.serializer.xnnpack.graph import XnnNode, XnnValue
from lowerdeck.serializer.xnnpack.operators import XnnOperator

WINDOWS = {
    XnnOperator.CONV2D: ("kernel", "subsampling"),
    XnnOperator.DEPTHWISE_CONV2D: ("kernel", "subsampling"),
    XnnOperator.MAX_POOLING_2D: ("pooling", "stride"),
    XnnOperator.AVG_POOLING_2D: ("pooling", "stride"),
}
# Operators whose output has no more elements than their input.
_NEVER_MORE = {
    *(XnnOperator.STATIC_RESHAPE, XnnOperator.STATIC_SLICE, XnnOperator.GLOBAL_AVG_POOLING_2D),
    XnnOperator.STATIC_TRANSPOSE,
}
Sizes = tuple[int | None, ...]
"""The inferred sizes of a value; None for an unknown size."""

_PRODUCTS = {XnnOperator.FULLY_CONNECTED, XnnOperator.BATCH_MATRIX_MULTIPLY}
_LIKE_INPUT = frozenset(
    operator
    for operator in XnnOperator
    if operator.table in {"Unary", "Softmax", "LeakyReLU", "ELU"}
)
_BROADCAST = {
    *(XnnOperator.ADD, XnnOperator.SUBTRACT, XnnOperator.MULTIPLY, XnnOperator.DIV),
    *(XnnOperator.MINIMUM, XnnOperator.MAXIMUM, XnnOperator.PRELU),
}


class RealSizes:
    """Sizes inferred from the graph's inputs, node by node.

    The runtime infers them at each call and uses the declared sizes of intermediate values only to
    allocate memory. If the result of a node cannot be inferred, its declared sizes are used; 0
    (dynamic) is unknown.
    """

    def __init__(self, values: Mapping[int, XnnValue]) -> None:
        """Start with the declared sizes of a graph.

        Args:
            values: The graph's values by id.
        """
        self._values = values
        self._sizes: dict[int, Sizes] = {}

    def of(self, number: int) -> Sizes:
        """Return the sizes of a graph input, a constant or an earlier node's output."""
        sizes = self._sizes.get(number)
        if sizes is not None:
            return sizes
        value = self._values[number]
        if value.constant or value.external_id is not None or 0 not in value.shape:
            self._sizes[number] = value.shape
        else:
            self._sizes[number] = tuple(size or None for size in value.shape)
        return self._sizes[number]

    def run(self, node: XnnNode) -> None:
        """Infer the output sizes of the next node, whose fields are verified."""
        sizes = self._after(node)
        if sizes is not None:
            self._sizes[node.outputs[0]] = sizes
        else:
            # `of` may have cached the declared sizes.
            self._sizes.pop(node.outputs[0], None)

    def most(self, node: XnnNode) -> int | None:
        """Return an upper bound on the elements of a node's output, None if there is none.

        Args:
            node: A node that was passed to :meth:`run`.
        """
        result = self._sizes.get(node.outputs[0])
        if result is not None:
            return _elements(result)
        inputs = [self.of(number) for number in node.inputs]
        elements = [_elements(sizes) for sizes in inputs]
        if node.operator in _NEVER_MORE:
            return elements[0]
        if node.operator.table == "Concatenate":
            counts = [count for count in elements if count is not None]
            return sum(counts) if len(counts) == len(elements) else None
        if node.operator in _PRODUCTS and inputs[0]:
            # Flags may transpose the second matrix; its longer side is an upper bound.
            *batches, height, width = (1, 1, *inputs[1])
            rows, batch_count = _elements(inputs[0][:-1]), _elements(batches)
            if None not in (rows, batch_count, height, width):
                return (rows or 0) * (batch_count or 0) * max(height or 0, width or 0)
        return None

    def _after(self, node: XnnNode) -> Sizes | None:
        source = self.of(node.inputs[0])
        if node.operator in _LIKE_INPUT:
            return source
        if node.operator is XnnOperator.STATIC_TRANSPOSE:
            axes = node.numbers("perm")[: len(source)]
            fits = sorted(axes) == list(range(len(source)))
            return tuple(source[axis] for axis in axes) if fits else None
        if node.operator is XnnOperator.STATIC_CONSTANT_PAD:
            return _padded(node, source)
        if node.operator is XnnOperator.GLOBAL_AVG_POOLING_2D:
            return None
        if node.operator in WINDOWS:
            return _window_output(node, source, self.of(node.outputs[0]))
        if node.operator in _BROADCAST:
            return _broadcast(source, self.of(node.inputs[1]))
        return None


def _elements(sizes: Sequence[int | None]) -> int | None:
    known_sizes: Any = sizes
    return None if None in sizes else prod(known_sizes)


def _broadcast(left: Sizes, right: Sizes) -> Sizes:
    rank = max(len(left), len(right))
    left = (1,) * (rank - len(left)) + left
    right = (1,) * (rank - len(right)) + right
    return tuple(map(_wider, left, right))


def _wider(left: int | None, right: int | None) -> int | None:
    if left is None or right is None:
        # An unknown size broadcasts with n > 1 only if it is n, 1 or 0: n is an upper bound.
        size = left if right is None else right
        return size if size is not None and size != 1 else None
    return max(left, right) if left and right else 0


def _padded(node: XnnNode, source: Sizes) -> Sizes:
    sides = zip(source, node.numbers("pre_paddings"), node.numbers("post_paddings"), strict=False)
    return tuple(None if size is None else size + before + after for size, before, after in sides)


def window(node: XnnNode, axis: str, size: int) -> tuple[int, int, int]:
    """Return the span of a window, the padded input size and the stride.

    Args:
        node: A node of ``WINDOWS``.
        axis: ``"height"`` or ``"width"``.
        size: Size of the input along the axis.
    """
    kind, step = WINDOWS[node.operator]
    # The runtime ignores the dilation of an average pool.
    is_average = node.operator is XnnOperator.AVG_POOLING_2D
    dilation = 1 if is_average else node.number(f"dilation_{axis}")
    span = (node.number(f"{kind}_{axis}") - 1) * dilation + 1
    before, after = ("top", "bottom") if axis == "height" else ("left", "right")
    padding = node.number(f"padding_{before}") + node.number(f"padding_{after}")
    return span, size + padding, max(1, node.number(f"{step}_{axis}"))


def _window_output(node: XnnNode, source: Sizes, result: Sizes) -> Sizes | None:
    """Return the output sizes of a sliding window, [batch, height, width, channels]."""
    if len(source) != 4 or len(result) != 4:
        return None

    def length(size: int | None, axis: str) -> int | None:
        if size is None:
            return None
        span, padded, stride = window(node, axis, size)
        if node.number("flags") & XnnNode.SAME_PADDING:
            return -(-size // stride)
        return max(0, padded - span) // stride + 1

    return (source[0], length(source[1], "height"), length(source[2], "width"), result[3])
