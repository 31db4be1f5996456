"""Values, constants and nodes of the payload under construction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TypeAlias

import torch
import xxhash
from torch import fx
from torch.types import IntLikeType as Dim

from lowerdeck.serializer import XnnConstant, XnnEncoding, XnnGraph, XnnNode, XnnOperator, XnnValue
from lowerdeck.torch_base import bytes_of
from lowerdeck.xnnpack.emit.scratch import Scratch
from lowerdeck.xnnpack.payload import BFLOAT, FLOAT, HALF, Layout

_PLAIN = {FLOAT: torch.float32, HALF: torch.float16, BFLOAT: torch.bfloat16}
Fields: TypeAlias = int | float | tuple[int, ...]
Range: TypeAlias = tuple[float, float]


class Values:
    """Builder of a payload's values, constants and nodes."""

    def __init__(self, *, half_weights: bool = False) -> None:
        self.half_weights: bool = half_weights
        """Whether layers with float32 inputs store their filters as float16."""
        self.graph: XnnGraph = XnnGraph()
        self.data: dict[XnnConstant, memoryview] = {}
        """The bytes of constants."""
        self.scratch: Scratch = Scratch()
        self.sources: list[tuple[fx.Node, ...]] = []
        """Source nodes of each payload node, indexed by its debug handle."""
        self.reads: XnnEncoding | None = FLOAT
        """Encoding in which operands are read; None to keep that of each operand."""
        self.writes: XnnEncoding = FLOAT
        """Encoding of the results of added nodes."""
        self._constants: dict[tuple[XnnConstant, tuple[int, ...], bool, XnnEncoding], int] = {}

    @contextmanager
    def stored(self, reads: XnnEncoding | None, writes: XnnEncoding) -> Iterator[None]:
        """Set the encodings that added nodes read and write.

        Args:
            reads: Encoding of operands; None to keep that of each operand.
        """
        before = self.reads, self.writes
        self.reads, self.writes = reads, writes
        try:
            yield
        finally:
            self.reads, self.writes = before

    def made_as(self, encoding: XnnEncoding | None) -> AbstractContextManager[None]:
        """Set the encoding of results of added nodes; None is a no-op."""
        return nullcontext() if encoding is None else self.stored(None, encoding)

    def encoding_of(self, value: int) -> XnnEncoding:
        """Return the encoding of a value."""
        return self.graph.values[value].encoding

    def new_value(self, shape: Sequence[Dim], layout: Layout = Layout.PLAIN) -> int:
        """Return the id of a new value in the current encoding of results.

        Args:
            shape: Sizes in torch's order.
        """
        # Dynamic sizes are declared as 0: the runtime replans memory only when a value outgrows
        # its declared or last size. With a declared bound, it would keep the plan of a smaller
        # first call, and overrun it.
        dims = tuple(size if isinstance(size, int) else 0 for size in layout.arrange(shape))
        return self._append(dims, self.writes).id

    def constant_value(
        self, tensor: torch.Tensor, *, packed: bool = False, encoding: XnnEncoding | None = None
    ) -> int:
        """Return the id of a constant value.

        Args:
            tensor: The data in any float dtype, dimensions in memory order.
            packed: Whether a convolution or a linear layer packs it. The runtime may free packed
                constants, so a constant with both uses is two values.
            encoding: Stored encoding, float or quantised; that of results by default.

        Returns:
            The id, deduplicated by bytes, shape, use and encoding.
        """
        chosen = encoding or (self.writes if self.writes in _PLAIN else FLOAT)
        return self.stored_constant(self._encoded(tensor, chosen), chosen, packed=packed)

    def packed(self, tensor: torch.Tensor | None, encoding: XnnEncoding | None = None) -> int:
        """Return the id of a constant that a layer packs; ``XnnNode.NONE`` for None."""
        if tensor is None:
            return XnnNode.NONE
        return self.constant_value(tensor, packed=True, encoding=encoding)

    def stored_constant(
        self,
        stored: torch.Tensor,
        encoding: XnnEncoding,
        *,
        packed: bool = False,
        dims: Sequence[int] | None = None,
    ) -> int:
        """Return the id of a constant value for stored bytes.

        Args:
            stored: The bytes, as a tensor of any dtype.
            dims: Sizes of the value if they differ from those of ``stored``, as for packed half
                bytes.
        """
        constant = self.data_constant(stored)
        shape = tuple(stored.shape if dims is None else dims)
        existing = self._constants.get((constant, shape, packed, encoding))
        if existing is not None:
            return existing
        value = self._append(shape, encoding)
        value.constant = constant
        self._constants[constant, shape, packed, encoding] = value.id
        return value.id

    def data_constant(self, stored: torch.Tensor) -> XnnConstant:
        """Return a constant without a value, such as the scales of another value."""
        return self._constant(bytes_of(self.scratch.keep(stored)))

    def rows_of(self, value: int, start: int, size: int) -> int:
        """Return the id of a constant value with a range of rows of another constant.

        Args:
            value: Id of the other value, with one scale or a scale per row.
        """
        whole = self.graph.values[value]
        assert whole.constant is not None
        rows, encoding = whole.shape[0], whole.encoding

        def part(constant: XnnConstant) -> XnnConstant:
            data = self.data[constant]
            row_length = len(data) // rows
            return self._constant(data[start * row_length : (start + size) * row_length])

        if encoding.scale_constant is not None:
            encoding = replace(encoding, scale_constant=part(encoding.scale_constant))
        selected = self._append((size, *whole.shape[1:]), encoding)
        selected.constant = part(whole.constant)
        return selected.id

    def value_like(self, value: XnnValue, dims: tuple[int, ...]) -> int:
        """Return the id of a new value with the encoding of an existing value.

        Args:
            dims: Its sizes in memory order.
        """
        return self._append(dims, value.encoding).id

    def _constant(self, data: memoryview) -> XnnConstant:
        """Add the bytes to the named data and return the constant that refers to them."""
        constant = XnnConstant(xxhash.xxh3_128_hexdigest(data), len(data))
        if constant not in self.data:
            self.data[constant] = data
            self.graph.constants.append(constant)
        return constant

    def _encoded(self, tensor: torch.Tensor, encoding: XnnEncoding) -> torch.Tensor:
        """Return float numbers converted to an encoding."""
        if not encoding.is_int8:
            return self.scratch.convert(tensor, _PLAIN[encoding])
        scale = float_of(encoding.scale)

        def rounded(piece: torch.Tensor) -> torch.Tensor:
            integers = (piece.double() / scale).round() + encoding.zero_point
            return integers.clamp(-128, 127)

        return self.scratch.convert(tensor, torch.int8, rounded)

    def _append(self, dims: tuple[int, ...], encoding: XnnEncoding) -> XnnValue:
        value = XnnValue(len(self.graph.values), encoding, dims)
        self.graph.values.append(value)
        return value

    def add(
        self,
        kind: XnnOperator,
        shape: Sequence[Dim],
        layout: Layout = Layout.PLAIN,
        output_range: Range | None = None,
        **fields: Fields,
    ) -> int:
        """Add a node and return the id of its result.

        Args:
            shape: Sizes of the result in torch's order.
            output_range: Minimum and maximum of a fused clamp.
            **fields: The fields of the node's table, without the output.
        """
        output = self.new_value(shape, layout)
        node = XnnNode(kind, {**fields, "output_id": output}, output_range, len(self.sources))
        self.graph.nodes.append(node)
        self.sources.append(())
        return output


def float_of(number: float) -> float:
    """Return a number rounded to float32, as stored in payloads."""
    return float(torch.tensor(number, dtype=torch.float32))
