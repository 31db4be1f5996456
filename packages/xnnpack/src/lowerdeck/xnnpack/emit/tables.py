"""Tables that a program computes of little: they are computed of as little again, not stored."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from lowerdeck.serializer import XnnGraph, XnnNode, XnnOperator, XnnValue
from lowerdeck.torch_base import bytes_of
from lowerdeck.xnnpack.emit.emission import Emission, Fields
from lowerdeck.xnnpack.payload.encoding import FLOAT, HALF

_FEWEST = 4096
"""Elements from which on a constant is larger than what computes it."""
_ADDING = {XnnOperator.ADD, XnnOperator.SUBTRACT}
_READERS = {*_ADDING, XnnOperator.MULTIPLY}
_OTHERS = {XnnOperator.COPY}
_FARTHEST = 1e5
"""Up to here the runtime's sines and cosines are right."""
_ROUNDING = 1e-6
"""How far a sum may be from what it stands for, which is added to something: sums are rounded.
Of a table of less than 1 it is that part of its largest number; of a larger one no more, since
beside a mask's -1e9 all that the others say would be rounding."""
_BITS = {FLOAT: torch.int32, HALF: torch.int16}
_DTYPES = {FLOAT: torch.float32, HALF: torch.float16}


def note_function(emission: Emission, kind: XnnOperator, argument: torch.Tensor) -> torch.Tensor:
    """Return a sine or a cosine that is computed ahead of time, and note what it is of.

    Args:
        emission: The payload that may store it.
        kind: Which of the two.
        argument: What it is of.
    """
    result = torch.cos(argument) if kind is XnnOperator.COS else torch.sin(argument)
    if argument.dtype == torch.float32 and argument.numel() >= _FEWEST:
        digest = hashlib.sha256(bytes_of(result.contiguous())).hexdigest()
        emission.functions[digest] = kind, argument
    return result


def compute_tables(emission: Emission, readers: Mapping[int, set[XnnOperator]]) -> None:
    """Let what is much smaller than a table compute it, at run time, once for all its readers.

    Args:
        emission: A payload in which every node is read.
        readers: The kinds of nodes that read each value that a table may be.
    """
    made = _Made(emission)
    for value in list(emission.graph.values):
        known = value.constant and value.encoding in _BITS and len(value.shape) >= 2
        read_by = readers.get(value.id, _OTHERS)
        if known and math.prod(value.shape) >= _FEWEST and read_by <= _READERS:
            made.replace(value, may_round=read_by <= _ADDING)
    emission.graph.nodes[:0] = made.nodes
    emission.sources[:0] = [()] * len(made.nodes)


class _Made:
    """The nodes that compute tables."""

    def __init__(self, emission: Emission) -> None:
        self._emission = emission
        self._products: dict[tuple[int, int], int] = {}
        self.nodes: list[XnnNode] = []

    def replace(self, value: XnnValue, *, may_round: bool) -> None:
        """Compute a table, if it is made of less than half of what it is."""
        assert value.constant is not None
        key = str(value.constant.key)
        # Copied, since torch has no tensors of what may only be read.
        whole = torch.frombuffer(
            bytearray(self._emission.data[value.constant]), dtype=_DTYPES[value.encoding]
        ).reshape(value.shape)
        half = _half(whole, _BITS[value.encoding])
        found = self._emission.functions.get(key) if value.encoding == FLOAT else None
        factors = None
        if found is not None:
            argument = found[1].reshape(value.shape)
            narrow = _half(argument, torch.int32) if half is not None else argument
            factors = None if narrow is None else _factors(narrow)
        if found is not None and factors is not None:
            self._apply(value, found[0], factors, twice=half is not None)
        elif half is not None:
            part = self._emission.constant_value(half, encoding=value.encoding)
            self._twice(value, part)
        else:
            summands = _summands(whole) if may_round and value.encoding == FLOAT else None
            if summands is None:
                return
            self._sum(value, *summands)
        value.constant = None

    def _sum(self, value: XnnValue, *summands: torch.Tensor) -> None:
        left, right = (self._emission.constant_value(one, encoding=FLOAT) for one in summands)
        dims = tuple(map(max, *(one.shape for one in summands)))
        flat = dims == value.shape
        result = value.id if flat else self._emission.value_like(value, dims)
        self._add(XnnOperator.ADD, result, input1_id=left, input2_id=right)
        if not flat:
            whole: dict[str, Fields] = {"num_dims": len(value.shape), "new_shape": value.shape}
            self._add(XnnOperator.STATIC_RESHAPE, value.id, input_id=result, **whole)

    def _apply(
        self, value: XnnValue, kind: XnnOperator, factors: Sequence[torch.Tensor], *, twice: bool
    ) -> None:
        left, right = (self._emission.constant_value(one, encoding=FLOAT) for one in factors)
        dims = (*value.shape[:-1], factors[1].shape[-1])
        if (left, right) not in self._products:
            product = self._products[left, right] = self._emission.value_like(value, dims)
            self._add(XnnOperator.MULTIPLY, product, input1_id=left, input2_id=right)
        source = self._products[left, right]
        result = self._emission.value_like(value, dims) if twice else value.id
        self._add(kind, result, input_id=source)
        if twice:
            self._twice(value, result)

    def _twice(self, value: XnnValue, part: int) -> None:
        axis = len(value.shape) - 1
        self._add(XnnOperator.CONCATENATE2, value.id, axis=axis, input1_id=part, input2_id=part)

    def _add(self, kind: XnnOperator, output: int, **fields: Fields) -> None:
        self.nodes.append(XnnNode(kind, {**fields, "output_id": output}))


def _half(table: torch.Tensor, bits: torch.dtype) -> torch.Tensor | None:
    """Return the first half of each row, if the second half is the same."""
    width = table.shape[-1]
    if width % 2:
        return None
    first, second = torch.split(table.contiguous().view(bits), width // 2, -1)
    return first.view(table.dtype) if torch.equal(first, second) else None


def _factors(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return a column and a row whose product a matrix is, exactly, or None.

    Positions times frequencies are; those at the position 1 and the frequency 1 are the factors.
    """
    rows, columns = table.shape[-2:]
    if rows * columns != table.numel() or float(table.abs().max()) > _FARTHEST:
        return None
    matrix = table.reshape(rows, columns)
    for row, column in (matrix == 1).nonzero()[:4].tolist():
        left, right = matrix[:, column : column + 1], matrix[row : row + 1]
        if torch.equal(left * right, matrix):
            ones = table.shape[:-2]
            return left.reshape(*ones, rows, 1), right.reshape(*ones, 1, columns)
    return None


def _summands(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return two tables of a dimension less each whose sum a table is to rounding, or None.

    Positions in an image are, of which one part tells the row and the other the column; the two
    may be one dimension.
    """
    if not bool(torch.isfinite(table).all()):
        return None
    bound = _ROUNDING * min(1.0, float(table.abs().max()))
    for grid in _grids(table):
        wide = [axis for axis, size in enumerate(grid.shape) if size > 1]
        for first, second in _pairs(wide):
            left, edge = grid.narrow(second, 0, 1), grid.narrow(first, 0, 1)
            right = edge - edge.narrow(second, 0, 1)
            small = 2 * (left.numel() + right.numel()) <= grid.numel()
            if small and float((left + right - grid).abs().max()) <= bound:
                return left, right
    return None


def _grids(table: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a table, and it with one dimension as a square."""
    yield table
    for axis, size in enumerate(table.shape):
        side = math.isqrt(size)
        if side > 1 and side * side == size and table.dim() < XnnGraph.MAX_RANK:
            yield table.reshape(*table.shape[:axis], side, side, *table.shape[axis + 1 :])


def _pairs(axes: Sequence[int]) -> Iterator[tuple[int, int]]:
    for place, one in enumerate(axes):
        for other in axes[place + 1 :]:
            yield one, other
