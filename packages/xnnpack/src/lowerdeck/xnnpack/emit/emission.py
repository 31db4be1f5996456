"""The growing payload of one partition: values in their layouts, constants, nodes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import fx
from torch.types import IntLikeType as Dim

from lowerdeck.serializer import NamedDataStore
from lowerdeck.torch_base import bytes_of, describe_node, upper_bound
from lowerdeck.xnnpack.emit.arguments import is_fixed, is_one, shape_of
from lowerdeck.xnnpack.errors import UnsupportedNodeError
from lowerdeck.xnnpack.payload.layout import Layout, conversion
from lowerdeck.xnnpack.payload.schema import (
    EXTERNAL_INPUT,
    EXTERNAL_OUTPUT,
    NONE,
    Constant,
    Graph,
    Node,
    NodeKind,
    Value,
)

ALIGNMENT = 16
Fields: TypeAlias = int | float | tuple[int, ...]
Range: TypeAlias = tuple[float, float]


@dataclass(slots=True)
class Tracked:
    """What is known of one tensor of the partition.

    Attributes:
        shape: Sizes as torch counts the dimensions.
        tensor: The data of a constant, else None.
        preferred: The layout in which the tensor came to be.
        ids: The values that hold it, by layout.
    """

    shape: tuple[Dim, ...]
    tensor: torch.Tensor | None = None
    preferred: Layout = Layout.PLAIN
    ids: dict[Layout, int] = field(default_factory=dict)


class Emission:
    """Collects the payload of one partition.

    An operator's emitter asks for its inputs in the layout it wants, adds nodes, and says which
    value is the result. Conversions between layouts appear at the first need and are kept.
    """

    def __init__(self) -> None:
        self.graph: Graph = Graph()
        self.named_data: NamedDataStore = NamedDataStore()
        self.sources: list[tuple[fx.Node, ...]] = []
        """The nodes that each node of the payload came from; its number is its debug handle."""
        self._tracked: dict[fx.Node, Tracked] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bool], int] = {}
        self._entries: dict[str, int] = {}
        self._scalars: dict[bytes, Tracked] = {}

    # -- the nodes of the partition

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._tracked

    def of(self, node: fx.Node | float) -> Tracked:
        """Return what is known of an operand: a node that was defined, or a number."""
        if not isinstance(node, fx.Node):
            return self.scalar(float(node))
        if node not in self._tracked:
            raise UnsupportedNodeError(
                f"XnnpackBackend has no value for {describe_node(node)}, which is read: only "
                "float32 tensors that the partition computes or is given can be used"
            )
        return self._tracked[node]

    def define(self, node: fx.Node, tracked: Tracked) -> None:
        """Say what a node's result is."""
        self._tracked[node] = tracked

    def define_value(self, node: fx.Node, value: int, layout: Layout = Layout.PLAIN) -> None:
        """Say which value holds a node's result, and in which layout."""
        self._tracked[node] = Tracked(shape_of(node), None, layout, {layout: value})

    def constant(self, node: fx.Node) -> torch.Tensor:
        """Return the data of a node that must be constant."""
        tensor = self.of(node).tensor
        if tensor is None:
            raise UnsupportedNodeError(
                f"XnnpackBackend needs the data of {describe_node(node)} ahead of time, but the "
                "partition is given it at run time: tag the constant with the node that reads it"
            )
        return tensor

    def scalar(self, number: float) -> Tracked:
        """Return a number as a tensor without dimensions."""
        key = struct.pack("<d", number)  # -0.0 is another divisor than 0.0
        if key not in self._scalars:
            self._scalars[key] = Tracked((), torch.tensor(number, dtype=torch.float32))
        return self._scalars[key]

    # -- values

    def new_value(self, shape: Sequence[Dim], layout: Layout = Layout.PLAIN) -> int:
        """Return the id of a new value.

        Args:
            shape: Sizes as torch counts the dimensions.
            layout: How the dimensions lie in memory.

        Returns:
            The id, without a producer yet.
        """
        dims = tuple(upper_bound(size) for size in layout.arrange(shape))
        return self._append(dims).id

    def external_input(self, shape: Sequence[Dim], position: int, layout: Layout) -> Tracked:
        """Return an argument of the delegate call as a tensor in the layout that it has there."""
        value = self._append(tuple(upper_bound(size) for size in layout.arrange(shape)))
        value.external_id, value.flags = position, EXTERNAL_INPUT
        self.graph.input_ids.append(value.id)
        self._note_layout(position, layout)
        return Tracked(tuple(shape), None, layout, {layout: value.id})

    def external_output(self, tracked: Tracked, position: int, layout: Layout) -> None:
        """Make a tensor the output at ``position`` of the delegate call, in a layout."""
        source = self.id_of(tracked, layout)
        value = self.graph.values[source]
        # The runtime keeps one role a value: whatever has one already is copied.
        if value.flags or value.constant:
            source = self.add(NodeKind.COPY, tracked.shape, layout, input_id=source)
            value = self.graph.values[source]
        value.external_id, value.flags = position, EXTERNAL_OUTPUT
        self.graph.output_ids.append(source)
        self._note_layout(position, layout)

    def constant_value(self, tensor: torch.Tensor, *, packed: bool = False) -> int:
        """Return the id of a constant value.

        Args:
            tensor: The data, its dimensions in the order of memory.
            packed: Whether a convolution or a linear layer packs it. The runtime may free what it
                packed, so a constant that is used both ways is two values.

        Returns:
            The id; the same for the same bytes, shape and use.
        """
        data = bytes_of(tensor.to(torch.float32))
        digest = hashlib.sha256(data).hexdigest()
        shape = tuple(tensor.shape)
        known = self._constants.get((digest, shape, packed))
        if known is not None:
            return known
        if digest not in self._entries:
            self.named_data.add_named_data(digest, data, alignment=ALIGNMENT)
            self._entries[digest] = len(self.graph.constants)
            self.graph.constants.append(Constant(digest, len(data)))
        value = self._append(shape)
        value.constant = self._entries[digest]
        self._constants[digest, shape, packed] = value.id
        return value.id

    def id_of(self, tracked: Tracked, layout: Layout = Layout.PLAIN) -> int:
        """Return the value that holds a tensor in a layout, converted if need be."""
        rank = len(tracked.shape)
        if rank < 3:
            layout = Layout.PLAIN
        known = tracked.ids.get(layout)
        if known is None:
            known = tracked.ids[layout] = self._converted(tracked, layout)
        return known

    def aligned(self, tracked: Tracked, rank: int, layout: Layout = Layout.PLAIN) -> int:
        """Return the value that holds an operand of a broadcast among tensors of ``rank``.

        Args:
            tracked: The operand, of at most ``rank`` dimensions.
            rank: Dimensions of the result.
            layout: Layout of the result.

        Returns:
            The id of a value that broadcasts in that layout as the operand does in torch.
        """
        missing = rank - len(tracked.shape)
        if layout is Layout.PLAIN or not missing or not tracked.shape:
            return self.id_of(tracked, layout)
        shape = (*(1,) * missing, *tracked.shape)
        if tracked.tensor is not None:
            tensor = tracked.tensor.reshape(shape).permute(layout.permutation(rank))
            return self.constant_value(tensor)
        widened = Tracked(shape, None, Layout.PLAIN)
        widened.ids[Layout.PLAIN] = self.reshaped(self.id_of(tracked), shape)
        return self.id_of(widened, layout)

    def common_layout(self, *operands: Tracked, rank: int) -> Layout:
        """Return the layout in which operands should meet: channels last if one lies so."""
        for one in operands:
            symbols = sum(not is_fixed(size) for size in one.shape)
            # It would be widened by a reshape, which carries one symbolic size.
            if len(one.shape) < rank and one.tensor is None and symbols > 1:
                return Layout.PLAIN
        if rank >= 3 and any(
            one.preferred is Layout.CHANNELS_LAST and len(one.shape) == rank for one in operands
        ):
            return Layout.CHANNELS_LAST
        return Layout.PLAIN

    # -- nodes

    def add(
        self,
        kind: NodeKind,
        shape: Sequence[Dim],
        layout: Layout = Layout.PLAIN,
        output_range: Range | None = None,
        **fields: Fields,
    ) -> int:
        """Add a node with a new value for its result.

        Args:
            kind: What it computes.
            shape: Sizes of the result, as torch counts the dimensions.
            layout: Layout of the result.
            output_range: Least and greatest result, where the node is to clamp.
            **fields: The fields of the node's table, without the output.

        Returns:
            The id of the result.
        """
        output = self.new_value(shape, layout)
        node = Node(kind, {**fields, "output_id": output}, output_range, len(self.sources))
        self.graph.nodes.append(node)
        self.sources.append(())
        return output

    def reshaped(self, value: int, shape: Sequence[Dim]) -> int:
        """Return ``value`` with other sizes; at most one of them is symbolic."""
        new_shape = tuple(size if isinstance(size, int) else 0 for size in shape)
        return self.add(
            NodeKind.STATIC_RESHAPE,
            shape,
            num_dims=len(new_shape),
            new_shape=new_shape,
            input_id=value,
        )

    def permuted(self, value: int, permutation: Sequence[int], shape: Sequence[Dim]) -> int:
        """Return ``value`` with its dimensions of memory in another order.

        Args:
            value: What to permute.
            permutation: Dimension i of the result is dimension ``permutation[i]`` of ``value``.
            shape: Sizes of the result in the order of memory.

        Returns:
            The id of the result; ``value`` itself where nothing changes.
        """
        if tuple(permutation) == tuple(range(len(permutation))):
            return value
        return self.add(
            NodeKind.STATIC_TRANSPOSE,
            shape,
            num_dims=len(permutation),
            perm=tuple(permutation),
            input_id=value,
        )

    def _converted(self, tracked: Tracked, layout: Layout) -> int:
        if tracked.tensor is not None:
            return self.constant_value(
                tracked.tensor.permute(layout.permutation(tracked.tensor.dim()))
            )
        (source,) = tracked.ids.values()
        dims = layout.arrange(tracked.shape)
        spatial, channels = tracked.shape[2:], tracked.shape[1]
        free = [size for size in tracked.shape if not is_fixed(size)]
        # With one channel or one pixel both layouts are the same bytes.
        if (is_one(channels) or all(is_one(size) for size in spatial)) and len(free) < 2:
            return self.reshaped(source, dims)
        return self.permuted(source, conversion(len(dims), layout), dims)

    def _note_layout(self, position: int, layout: Layout) -> None:
        if layout is Layout.CHANNELS_LAST:
            self.graph.channels_last.add(position)

    def _append(self, dims: tuple[int, ...]) -> Value:
        value = Value(len(self.graph.values), dims, 0, NONE, 0)
        self.graph.values.append(value)
        return value
