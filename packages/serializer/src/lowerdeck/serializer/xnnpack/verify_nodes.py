"""Checks of the fields and operands of XNNPACK nodes that can crash the runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from lowerdeck.serializer.errors import ContentError
from lowerdeck.serializer.xnnpack.graph import XnnGraph, XnnNode, XnnValue
from lowerdeck.serializer.xnnpack.operators import XnnDatatype, XnnOperator
from lowerdeck.serializer.xnnpack.sizes import WINDOWS, RealSizes, window

_MAX_FIELD = 1 << 24  # larger sizes, strides and dilations are taken as mistakes
# First words of the names of fields that must not be 0.
_FROM_ONE = {"kernel", "subsampling", "dilation", "groups", "group", "pooling", "stride"}
# Tables of operators whose weights the runtime packs at load.
_PACKING = ("FullyConnected", "Convolution")


def damaged(reason: str) -> ContentError:
    """Return the error for an invalid payload."""
    return ContentError(reason, field="XNNPACK payload")


class NodeVerifier:
    """Checks the nodes of one graph with verified values."""

    def __init__(self, graph: XnnGraph, values: Mapping[int, XnnValue]) -> None:
        """Create a verifier.

        Args:
            values: The graph's values by id.
        """
        self._graph = graph
        self._values = values

    def verify(self) -> None:
        """Check all nodes.

        Raises:
            FormatError: A node refers to a missing value, or is not safe to run.
        """
        packed: set[int] = set()
        sizes = RealSizes(self._values)
        for node in self._graph.nodes:
            for kind, ids in (("input", node.inputs), ("output", node.outputs)):
                for number in ids:
                    if number not in self._values:
                        raise damaged(
                            f"found value {number} as {kind} of {node.operator.label}, but there "
                            "is no such value"
                        )
            self._verify_fields(node)
            self._verify_lists(node)
            self._verify_window(node, sizes.of(node.inputs[0]))
            sizes.run(node)
            self._verify_declared(node, sizes.most(node))
            if node.operator.table in _PACKING:
                self._verify_packing(node)
                packed.update(node.inputs[1:])
        for node in self._graph.nodes:
            unpacked = node.inputs[:1] if node.operator.table in _PACKING else node.inputs
            for number in unpacked:
                if number in packed and self._values[number].constant:
                    raise damaged(
                        f"found the constant {number} as a filter or bias, and as an input of "
                        f"{node.operator.label}: the runtime frees it after packing and crashes "
                        "at the second use if the file is mapped; use two values"
                    )

    def _verify_declared(self, node: XnnNode, most: int | None) -> None:
        """Raise if a value declares, and so allocates, more elements than its node produces."""
        result = self._values[node.outputs[0]]
        # Dynamic sizes may be declared as 0.
        if most and result.external_id is None and prod(result.shape) > most:
            raise damaged(
                f"found the sizes {result.shape} of XNNPACK value {result.id}, expected at most "
                f"{most} elements, the output of {node.operator.label}"
            )

    def _verify_fields(self, node: XnnNode) -> None:
        """Check sizes, strides and dilations, which the runtime divides by or multiplies."""
        for name, setting in node.parameters.items():
            if isinstance(setting, tuple):
                if setting and max(setting) > _MAX_FIELD:
                    raise damaged(
                        f"found {max(setting)} in {name} of {node.operator.label}, expected at "
                        f"most {_MAX_FIELD}"
                    )
                continue
            if name == "flags" or isinstance(setting, float):
                continue
            first = name.partition("_")[0]
            # The runtime ignores the dilation of an average pool.
            unread = first == "dilation" and node.operator is XnnOperator.AVG_POOLING_2D
            least = int(first in _FROM_ONE and not unread)
            if not least <= setting <= _MAX_FIELD:
                raise damaged(
                    f"found {setting} as {name} of {node.operator.label}, expected {least} to "
                    f"{_MAX_FIELD}"
                )

    def _verify_lists(self, node: XnnNode) -> None:
        lists = {
            name: items for name, items in node.parameters.items() if isinstance(items, tuple)
        }
        if not lists:
            return
        count = node.parameters.get("num_dims")
        # Only a pad has no field for the count; it uses the rank of its input.
        rank = count if isinstance(count, int) else len(self._values[node.inputs[0]].shape)
        for name, items in lists.items():
            if len(items) < rank or rank > XnnGraph.MAX_RANK:
                raise damaged(
                    f"found {len(items)} {name} of {node.operator.label}, expected {rank}, at "
                    f"most {XnnGraph.MAX_RANK}"
                )
        order = lists.get("perm", ())[:rank]
        if node.operator is XnnOperator.STATIC_TRANSPOSE and sorted(order) != list(range(rank)):
            raise damaged(f"found the order {order}, expected a permutation of {rank} dimensions")

    def _verify_window(self, node: XnnNode, sizes: Sequence[int | None]) -> None:
        """Raise if a window is larger than its padded input, which crashes the runtime."""
        same = node.number("flags") & XnnNode.SAME_PADDING
        if node.operator not in WINDOWS or same or len(sizes) != 4:
            return
        for axis, size in (("height", sizes[1]), ("width", sizes[2])):
            if size is None:
                continue
            span, padded, _ = window(node, axis, size)
            if span > padded:
                raise damaged(
                    f"found a window of {node.operator.label} that spans {span}, expected at "
                    f"most the padded {axis} {padded}"
                )

    def _verify_packing(self, node: XnnNode) -> None:
        """Raise if the runtime would read weights beyond their end, or after freeing them."""
        label = node.operator.label
        source, filters, *more = (self._values[number] for number in node.inputs)
        for bias in more:
            if bool(bias.constant) != bool(filters.constant):
                raise damaged(
                    f"found a {label} of which exactly one of filter and bias is constant: the "
                    "runtime frees that one and reads it again, and crashes if the file is mapped"
                )
        if not filters.constant:
            return
        outputs, expected = _filter_sizes(node, filters)
        if expected is not None and filters.shape != expected:
            raise damaged(
                f"found a filter {filters.shape} of {label}, expected {expected} from its fields"
            )
        for bias in more:
            if prod(bias.shape) < outputs:
                raise damaged(f"found a bias {bias.shape} of {label}, expected {outputs} elements")
        if not prod(filters.shape):
            raise damaged(f"found a filter of {label} without elements")
        four_bits = (source.dtype, filters.dtype) == (XnnDatatype.FP32, XnnDatatype.QCINT4)
        if four_bits and node.number("flags") & XnnNode.TRANSPOSE_WEIGHTS:
            raise damaged(
                f"found a floating-point {label} with a transposed 4-bit filter, on which the "
                "runtime crashes"
            )


def _filter_sizes(node: XnnNode, filters: XnnValue) -> tuple[int, tuple[int, ...] | None]:
    """Return the number of outputs of a filter, and the sizes that its fields require, or None."""
    if node.operator is XnnOperator.FULLY_CONNECTED:
        sizes = filters.shape
        return (
            sizes[node.number("flags") & XnnNode.TRANSPOSE_WEIGHTS] if len(sizes) > 1 else 0
        ), None
    outputs = node.number("groups") * node.number("group_output_channels")
    window = (node.number("kernel_height"), node.number("kernel_width"))
    if node.operator is XnnOperator.DEPTHWISE_CONV2D:
        return outputs, (1, *window, outputs)
    return outputs, (outputs, *window, node.number("group_input_channels"))
