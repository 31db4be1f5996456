"""Tensors of the payload under construction, in their layouts and encodings."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.types import IntLikeType as Dim

from lowerdeck.serializer import XnnEncoding, XnnOperator, XnnValue
from lowerdeck.torch_base import describe_node, upper_bound
from lowerdeck.xnnpack.emit.arguments import broadcast, is_fixed, is_one
from lowerdeck.xnnpack.emit.tensors import Tracked
from lowerdeck.xnnpack.emit.values import Fields, Range, Values
from lowerdeck.xnnpack.errors import UnsupportedNodeError
from lowerdeck.xnnpack.payload import FLOAT, PER_IMAGE, Layout, conversion, int8

MOST_RESCALED = 128
"""Largest ratio of input scale to result scale that the runtime's Convert computes correctly."""


class Emission(Values):
    """Payload of one partition under construction.

    An operator's emitter requests its inputs in a layout, adds nodes, and defines the result.
    Conversions between layouts are added at first use and shared.
    """

    def __init__(
        self, *, half_weights: bool = False, ranges: Mapping[Any, Any] | None = None
    ) -> None:
        super().__init__(half_weights=half_weights)
        self._ranges = ranges
        self.channels_last: set[int] = set()
        """Positions of the channels-last arguments of the delegate call."""
        self._tracked: dict[fx.Node, Tracked] = {}
        self.in_float: dict[str, str] = {}
        """Reason for each node of a quantised program that is computed in float."""
        self.functions: dict[str, tuple[XnnOperator, torch.Tensor]] = {}
        """Function and argument of each folded sine or cosine, by constant key."""
        self._dynamic: dict[tuple[int, XnnEncoding], int] = {}
        self._scalars: dict[bytes, Tracked] = {}

    # -- the nodes of the partition

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._tracked

    def of(self, node: fx.Node | float) -> Tracked:
        """Return an operand (node or number) as a tensor."""
        if not isinstance(node, fx.Node):
            return self.scalar(float(node))
        if node not in self._tracked:
            raise UnsupportedNodeError(
                f"XnnpackBackend found the operand {describe_node(node)}, expected a float tensor "
                "computed or passed as an input: leave its user out of the partition"
            )
        return self._tracked[node]

    def define(self, node: fx.Node, tracked: Tracked) -> None:
        """Define the result of a node."""
        self._tracked[node] = tracked

    def tracked(self, shape: Sequence[Dim], value: int, layout: Layout = Layout.PLAIN) -> Tracked:
        """Return a tensor for a value."""
        return Tracked(tuple(shape), None, layout, {layout: value}, self.encoding_of(value))

    def constant(self, node: fx.Node) -> torch.Tensor:
        """Return the data of a node that must be constant."""
        tensor = self.of(node).tensor
        if tensor is None:
            raise UnsupportedNodeError(
                f"XnnpackBackend needs the data of {describe_node(node)} ahead of time, but the "
                "partition gets it as an input: give the constant the tag of its user"
            )
        return tensor

    def optional(self, node: fx.Node | None) -> torch.Tensor | None:
        """Return the data of an argument that must be constant or None."""
        return None if node is None else self.constant(node)

    def scalar(self, number: float) -> Tracked:
        """Return a number as a 0-dim tensor."""
        key = struct.pack("<d", number)  # 0.0 and -0.0 are different divisors
        if key not in self._scalars:
            self._scalars[key] = Tracked((), torch.tensor(number, dtype=torch.float32))
        return self._scalars[key]

    def in_encoding(self, tracked: Tracked, encoding: XnnEncoding) -> Tracked:
        """Return the tensor in another encoding; the conversion is shared by all uses."""
        if tracked.encoding == encoding:
            return tracked
        if encoding not in tracked.conversions:
            tracked.conversions[encoding] = self._in_encoding(tracked, encoding)
        return tracked.conversions[encoding]

    def _in_encoding(self, tracked: Tracked, encoding: XnnEncoding) -> Tracked:
        if tracked.is_constant:
            return Tracked(tracked.shape, tracked.data, tracked.preferred, {}, encoding)
        if not _converts(tracked.encoding, encoding):
            tracked = self.in_encoding(tracked, FLOAT)
        ids = tracked.ids
        layout = tracked.preferred if tracked.preferred in ids else next(iter(ids))
        shape = tracked.shape
        with self.stored(None, encoding):
            value = self.add(XnnOperator.CONVERT, shape, layout, input_id=ids[layout])
        return Tracked(shape, None, layout, {layout: value}, encoding)

    def dynamic(
        self, value: int, shape: Sequence[Dim], layout: Layout, encoding: XnnEncoding
    ) -> int:
        """Return the id of a float value quantised dynamically.

        Args:
            value: Id of the floats. Linear layers share the result. Convolutions do not: the
                runtime stores scales differently for 1x1 filters, and computes garbage if 1x1 and
                larger filters read the same value.
            shape: Its sizes in torch's order.
            encoding: ``PER_ROW`` for a linear layer, ``PER_IMAGE`` for a convolution.
        """
        existing = None if encoding == PER_IMAGE else self._dynamic.get((value, encoding))
        if existing is None:
            with self.stored(None, encoding):
                existing = self.add(XnnOperator.CONVERT, shape, layout, input_id=value)
            self._dynamic[value, encoding] = existing
        return existing

    # -- values

    def external_input(
        self,
        shape: Sequence[Dim],
        position: int,
        layout: Layout,
        encoding: XnnEncoding = FLOAT,
    ) -> Tracked:
        """Add the argument of the delegate call at ``position`` as an input, in ``layout``."""
        dims = tuple(upper_bound(size, self._ranges) for size in layout.arrange(shape))
        value = self._append(dims, encoding)
        value.external_id, value.flags = position, XnnValue.INPUT
        self.graph.input_ids.append(value.id)
        self._note_layout(position, layout)
        return self.tracked(shape, value.id, layout)

    def external_output(
        self, tracked: Tracked, position: int, layout: Layout, encoding: XnnEncoding | None = FLOAT
    ) -> None:
        """Make a tensor the output at ``position`` of the delegate call.

        Args:
            position: Position among the arguments of the call, including inputs.
            layout: Layout in the program.
            encoding: Encoding in the program; None to keep that of the tensor.
        """
        output = tracked if encoding is None else self.in_encoding(tracked, encoding)
        with self.stored(None, output.encoding):
            self._external_output(output, position, layout)

    def _external_output(self, tracked: Tracked, position: int, layout: Layout) -> None:
        source = self.id_of(tracked, layout)
        value = self.graph.values[source]
        # An input, a constant or another output must be copied.
        if value.flags or value.constant:
            source = self.add(XnnOperator.COPY, tracked.shape, layout, input_id=source)
            value = self.graph.values[source]
        value.external_id, value.flags = position, XnnValue.OUTPUT
        self.graph.output_ids.append(source)
        self._note_layout(position, layout)

    def id_of(self, tracked: Tracked, layout: Layout = Layout.PLAIN) -> int:
        """Return the id of a tensor's value in a layout, converting if necessary."""
        record = self._in_operand_encoding(tracked)
        if len(record.shape) < 3:
            layout = Layout.PLAIN
        existing = record.ids.get(layout)
        if existing is None:
            existing = record.ids[layout] = self._converted(record, layout)
        return existing

    def _in_operand_encoding(self, tracked: Tracked) -> Tracked:
        """Return a tensor in the encoding of the current node's operands."""
        if self.reads is not None:
            return self.in_encoding(tracked, self.reads)
        if self.writes.is_int8 and tracked.encoding == FLOAT and tracked.tensor is not None:
            # A scalar scaled to +-127 is exact.
            largest = float(tracked.tensor.abs().max())
            return self.in_encoding(tracked, int8(largest / 127 if largest else 1.0))
        return tracked

    def aligned(self, tracked: Tracked, rank: int, layout: Layout = Layout.PLAIN) -> int:
        """Return the id of an operand's value that broadcasts as in torch, in the given layout.

        Args:
            tracked: The operand, of at most ``rank`` dimensions.
            rank: Dimensions of the result.
        """
        missing = rank - len(tracked.shape)
        if layout is Layout.PLAIN or not missing or not tracked.shape:
            return self.id_of(tracked, layout)
        shape = (*(1,) * missing, *tracked.shape)
        record = self._in_operand_encoding(tracked)
        if record.tensor is not None:
            tensor = record.tensor.reshape(shape).permute(layout.permutation(rank))
            return self.constant_value(tensor, encoding=record.encoding)
        with self.stored(None, record.encoding):
            widened = self.tracked(shape, self.reshaped(self.id_of(record), shape))
            return self.id_of(widened, layout)

    def common_layout(self, *operands: Tracked, rank: int) -> Layout:
        """Return a layout for operands: channels last if one has it and others can broadcast."""
        for operand in operands:
            if len(operand.shape) < rank and not operand.is_constant:
                # Broadcasting it needs a reshape, which supports one symbolic size.
                symbols = sum(not is_fixed(size) for size in operand.shape)
                if symbols > 1:
                    return Layout.PLAIN
        if rank >= 3 and any(
            operand.preferred is Layout.CHANNELS_LAST and len(operand.shape) == rank
            for operand in operands
        ):
            return Layout.CHANNELS_LAST
        return Layout.PLAIN

    # -- nodes

    def unary(
        self,
        kind: XnnOperator,
        operand: Tracked,
        limits: Range | None = None,
        *,
        shape: Sequence[Dim] | None = None,
        layout: Layout | None = None,
        **fields: Fields,
    ) -> Tracked:
        """Add a unary node.

        Args:
            limits: Minimum and maximum to clamp the result to.
            shape: Sizes of the result; the operand's by default.
            layout: Layout of operand and result; the operand's preferred one by default.
            **fields: Fields of the node's table except input and output.
        """
        shape = operand.shape if shape is None else shape
        layout = operand.preferred if layout is None else layout
        value = self.id_of(operand, layout)
        return self.tracked(
            shape, self.add(kind, shape, layout, limits, input_id=value, **fields), layout
        )

    def binary(
        self,
        kind: XnnOperator,
        left: Tracked | float,
        right: Tracked | float,
        limits: Range | None = None,
        *,
        shape: Sequence[Dim] | None = None,
        **fields: Fields,
    ) -> Tracked:
        """Add a binary node with broadcasting.

        Args:
            limits: Minimum and maximum to clamp the result to.
            shape: Sizes of the result; the broadcast sizes by default.
            **fields: Fields of the node's table except inputs and output.
        """
        left, right = (self.scalar(x) if isinstance(x, float) else x for x in (left, right))
        shape = broadcast(left.shape, right.shape) if shape is None else shape
        layout = self.common_layout(left, right, rank=len(shape))
        fields["input1_id"] = self.aligned(left, len(shape), layout)
        fields["input2_id"] = self.aligned(right, len(shape), layout)
        return self.tracked(shape, self.add(kind, shape, layout, limits, **fields), layout)

    def layer(
        self,
        value: int,
        shape: Sequence[Dim],
        weights: tuple[int, int],
        limits: Range | None = None,
        flags: int = 0,
    ) -> Tracked:
        """Return a linear layer of a value.

        Args:
            value: The id of its input.
            weights: The ids of its filters and its bias.
            limits: Minimum and maximum to clamp the result to.
            flags: ``XnnNode.TRANSPOSE_WEIGHTS`` for filters of shape (inputs, outputs).
        """
        filters, bias = weights
        fields = {"input1_id": value, "filter_id": filters, "bias_id": bias, "flags": flags}
        kind = XnnOperator.FULLY_CONNECTED
        return self.tracked(shape, self.add(kind, shape, Layout.PLAIN, limits, **fields))

    def plain(self, tensor: Tracked) -> Tracked:
        """Return a tensor in the plain layout."""
        return self.tracked(tensor.shape, self.id_of(tensor))

    def view(self, tensor: Tracked, shape: Sequence[Dim]) -> Tracked:
        """Return a tensor with other sizes, in the plain layout; at most one is symbolic."""
        return self.tracked(shape, self.reshaped(self.id_of(tensor), shape))

    def transposed(self, tensor: Tracked, order: Sequence[int]) -> Tracked:
        """Return a tensor with its dimensions in another order, in the plain layout."""
        shape = [tensor.shape[axis] for axis in order]
        return self.tracked(shape, self.permuted(self.id_of(tensor), order, shape))

    def part(
        self,
        tensor: Tracked,
        offsets: Sequence[int],
        sizes: Sequence[int],
        layout: Layout | None = None,
    ) -> Tracked:
        """Return a slice of a tensor.

        Args:
            offsets: Start in each dimension, in torch's order.
            sizes: Size in each dimension; 0 for the whole dimension, also if dynamic.
            layout: Layout of the slice, the preferred one by default.
        """
        layout = layout or tensor.preferred
        return self.unary(
            XnnOperator.STATIC_SLICE,
            tensor,
            shape=[size or whole for size, whole in zip(sizes, tensor.shape, strict=True)],
            layout=layout,
            num_dims=len(sizes),
            offsets=layout.arrange(offsets),
            sizes=layout.arrange(sizes),
        )

    def padded(
        self,
        tensor: Tracked,
        before: Sequence[int],
        after: Sequence[int],
        number: float | None = None,
        layout: Layout | None = None,
    ) -> Tracked:
        """Return a tensor padded with a constant.

        Args:
            before: Amount before each dimension, in torch's order.
            number: The padding value, 0 if None.
            layout: The layout of the result, the tensor's preferred one by default.
        """
        layout = layout or tensor.preferred
        sizes = zip(before, tensor.shape, after, strict=True)
        fields: dict[str, Fields] = {} if number is None else {"padding_value": number}
        return self.unary(
            XnnOperator.STATIC_CONSTANT_PAD,
            tensor,
            None,
            shape=[first + size + last for first, size, last in sizes],
            layout=layout,
            pre_paddings=layout.arrange(before),
            post_paddings=layout.arrange(after),
            **fields,
        )

    def sliced(self, tensor: Tracked, axis: int, start: int, size: int) -> Tracked:
        """Return a slice of static size along one dimension."""
        if is_fixed(tensor.shape[axis]) and size == tensor.shape[axis]:
            return tensor
        at = [position == axis for position in range(len(tensor.shape))]
        return self.part(
            tensor, [start * position for position in at], [size * position for position in at]
        )

    def reshaped(self, value: int, shape: Sequence[Dim]) -> int:
        """Return the id of ``value`` with other sizes; at most one of them is symbolic."""
        new_shape = tuple(size if isinstance(size, int) else 0 for size in shape)
        with self.stored(self.reads, self.encoding_of(value)):
            return self.add(
                XnnOperator.STATIC_RESHAPE,
                shape,
                num_dims=len(new_shape),
                new_shape=new_shape,
                input_id=value,
            )

    def sized(self, tracked: Tracked, layout: Layout) -> Tracked:
        """Return a tensor with its sizes set explicitly; at most one is symbolic.

        A convolution of an empty batch leaves the height and width of its result unset, which
        crashes the nodes that read it.
        """
        with self.stored(None, tracked.encoding):
            value = self.reshaped(self.id_of(tracked, layout), layout.arrange(tracked.shape))
        return Tracked(tracked.shape, None, layout, {layout: value}, tracked.encoding)

    def permuted(self, value: int, permutation: Sequence[int], shape: Sequence[Dim]) -> int:
        """Return ``value`` with its memory dimensions permuted.

        Args:
            permutation: Dimension i of the result is dimension ``permutation[i]`` of ``value``.
            shape: Sizes of the result in the order of memory.

        Returns:
            The id of the result; ``value`` for an identity permutation.
        """
        if tuple(permutation) == tuple(range(len(permutation))):
            return value
        with self.stored(self.reads, self.encoding_of(value)):
            return self.add(
                XnnOperator.STATIC_TRANSPOSE,
                shape,
                num_dims=len(permutation),
                perm=tuple(permutation),
                input_id=value,
            )

    def _converted(self, tracked: Tracked, layout: Layout) -> int:
        tensor = tracked.tensor
        if tensor is not None:
            permuted = tensor.permute(layout.permutation(tensor.dim()))
            return self.constant_value(permuted, encoding=tracked.encoding)
        (source,) = tracked.ids.values()
        dims = layout.arrange(tracked.shape)
        spatial, channels = tracked.shape[2:], tracked.shape[1]
        free = [size for size in tracked.shape if not is_fixed(size)]
        # With one channel or one pixel both layouts have the same bytes.
        if (is_one(channels) or all(is_one(size) for size in spatial)) and len(free) < 2:
            return self.reshaped(source, dims)
        return self.permuted(source, conversion(len(dims), layout), dims)

    def _note_layout(self, position: int, layout: Layout) -> None:
        if layout is Layout.CHANNELS_LAST:
            self.channels_last.add(position)


def _converts(source: XnnEncoding, target: XnnEncoding) -> bool:
    """Return whether one Convert node is enough; other conversions go through float32."""
    if source.is_int8 and target.is_int8:
        # Above this ratio the runtime silently returns garbage.
        return source.scale / target.scale <= MOST_RESCALED
    return source == FLOAT or target == FLOAT
