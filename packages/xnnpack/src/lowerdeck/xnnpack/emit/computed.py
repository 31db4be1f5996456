"""Compute structured constants at run time instead of storing them: causal masks, positions.

A causal mask of n tokens has n * n stored elements, but is computed from two vectors of n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import xxhash

from lowerdeck.serializer import XnnGraph, XnnOperator, XnnValue
from lowerdeck.torch_base import bytes_of
from lowerdeck.xnnpack.emit.emission import Emission
from lowerdeck.xnnpack.emit.regrouping import joined
from lowerdeck.xnnpack.emit.tensors import Tracked
from lowerdeck.xnnpack.payload import FLOAT, HALF

_FEWEST = 4096
"""Minimum number of elements of a computed constant; smaller ones are stored."""
_MOST = 1 << 20
"""Elements compared per chunk."""
_ADDING = {XnnOperator.ADD, XnnOperator.SUBTRACT}
_READERS = {*_ADDING, XnnOperator.MULTIPLY}
_OTHERS = {XnnOperator.COPY}
_FARTHEST = 1e5
"""Largest argument at which the runtime's sine and cosine are accurate."""
_ROUNDING = 1e-6
"""Tolerance of a computed sum that replaces a stored table. Relative to the largest element if
that is below 1, otherwise absolute: relative to a mask's -1e9, a position of 100 would round to 0.
"""
_LARGEST = float(torch.finfo(torch.float32).max)
_DTYPES = {FLOAT: torch.float32, HALF: torch.float16}
_Products = dict[tuple[int, int], Tracked]


def note_function(emission: Emission, kind: XnnOperator, argument: torch.Tensor) -> torch.Tensor:
    """Constant-fold a sine or cosine, and record its argument."""
    result = torch.cos(argument) if kind is XnnOperator.COS else torch.sin(argument)
    if argument.dtype == torch.float32 and argument.numel() >= _FEWEST:
        digest = xxhash.xxh3_128_hexdigest(bytes_of(result.contiguous()))
        emission.functions[digest] = kind, argument
    return result


def compute_constants(emission: Emission, readers: Mapping[int, set[XnnOperator]]) -> None:
    """Replace stored masks and tables by nodes that compute them, before all other nodes.

    Args:
        emission: A complete payload.
        readers: The kinds of nodes that read each value.
    """
    graph, sources, count = emission.graph, emission.sources, len(emission.graph.nodes)
    renamed: dict[int, int] = {}
    products: _Products = {}
    for value in list(graph.values):
        read_by = readers.get(value.id, _OTHERS)
        eligible = (
            value.constant and value.encoding in _DTYPES and math.prod(value.shape) >= _FEWEST
        )
        if not eligible or len(value.shape) < 2 or not read_by <= _READERS:
            continue
        with emission.stored(None, value.encoding):
            computed = _step(emission, value) if read_by <= _ADDING else None
            computed = computed or _table(emission, value, products, may_round=read_by <= _ADDING)
            if computed is not None:
                renamed[value.id] = emission.id_of(computed)
    if renamed:
        graph.nodes[:] = [
            *graph.nodes[count:],
            *(node.reading(renamed) for node in graph.nodes[:count]),
        ]
        sources[:] = [*sources[count:], *sources[:count]]


def _data(emission: Emission, value: XnnValue) -> torch.Tensor:
    assert value.constant is not None
    # Copied because torch has no read-only tensors.
    data = bytearray(emission.data[value.constant])
    return torch.frombuffer(data, dtype=_DTYPES[value.encoding]).reshape(value.shape)


def _step(emission: Emission, value: XnnValue) -> Tracked | None:
    """Match a causal mask: 0 up to a diagonal, and one number above it.

    The mask is computed as column minus row index, clamped to 0 and 1, times the number, which may
    be -inf.
    """
    *outer, rows, columns = value.shape
    if value.encoding != FLOAT or math.prod(outer) != 1:
        return None
    matrix = _data(emission, value).reshape(rows, columns)
    number, first = float(matrix[0, -1]), int((matrix[0] == 0).sum())
    if not first or number in (0.0, math.inf) or math.isnan(number):
        return None
    height = max(1, _MOST // columns)
    for start in range(0, rows, height):
        part = matrix[start : start + height]
        if not torch.equal(part, torch.full(part.shape, number).triu(first + start)):
            return None
    ones = (1,) * len(outer)
    across = torch.arange(columns, dtype=torch.float32).reshape(*ones, 1, -1)
    down = torch.arange(rows, dtype=torch.float32).reshape(*ones, -1, 1) + (first - 1)
    difference = emission.binary(
        XnnOperator.SUBTRACT, Tracked.of(across), Tracked.of(down), (0.0, 1.0)
    )
    # One multiplication cannot map 0 to 0 and 1 to -inf.
    for factor in [number] if number != -math.inf else [-_LARGEST, 2.0]:
        difference = emission.binary(XnnOperator.MULTIPLY, difference, factor)
    return difference


def _table(
    emission: Emission, value: XnnValue, products: _Products, *, may_round: bool
) -> Tracked | None:
    """Match a function of an outer product, two equal halves, or an outer sum."""
    assert value.constant is not None
    whole = _data(emission, value)
    half = _half(whole)
    function = emission.functions.get(str(value.constant.key)) if value.encoding == FLOAT else None
    part = None if half is None else Tracked.of(half, value.encoding)
    if function is not None:
        argument = function[1].reshape(value.shape)
        narrow = argument if half is None else _half(argument)
        factors = None if narrow is None else _factors(narrow)
        if factors is not None:
            left, right = map(Tracked.of, factors)
            key = emission.id_of(left), emission.id_of(right)
            if key not in products:
                products[key] = emission.binary(XnnOperator.MULTIPLY, left, right)
            part = emission.unary(function[0], products[key])
    if part is None and may_round and value.encoding == FLOAT:
        summands = _summands(whole)
        if summands is not None:
            left, right = map(Tracked.of, summands)
            part = emission.binary(XnnOperator.ADD, left, right)
            return part if part.shape == value.shape else emission.view(part, value.shape)
    if part is None or half is None:
        return part
    return joined(emission, [part] * 2, len(value.shape) - 1)


def _half(table: torch.Tensor) -> torch.Tensor | None:
    """Return the first half of each row, if the second half is equal."""
    width = table.shape[-1]
    if width % 2:
        return None
    # Bitwise, because 0.0 and -0.0 differ.
    bits = torch.int32 if table.element_size() == 4 else torch.int16
    first, second = torch.split(table.contiguous().view(bits), width // 2, -1)
    return first.view(table.dtype) if torch.equal(first, second) else None


def _factors(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return a column and a row whose outer product equals a matrix exactly, or None.

    Rotary embeddings are positions times frequencies: the factors are the row of position 1 and
    the column of frequency 1.
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
    """Return two smaller tables whose broadcast sum equals a table up to rounding, or None.

    Position tables of images are sums of a row part and a column part; rows and columns may be
    flattened to one dimension.
    """
    if not bool(torch.isfinite(table).all()):
        return None
    bound, shape = _ROUNDING * min(1.0, float(table.abs().max())), table.shape
    sides = [math.isqrt(size) for size in shape]
    squares = [
        table.reshape(*shape[:axis], side, side, *shape[axis + 1 :])
        for axis, side in enumerate(sides)
        if side > 1 and side * side == shape[axis] and table.dim() < XnnGraph.MAX_RANK
    ]
    for grid in (table, *squares):
        for axis in range(grid.dim() - 1):
            left, edge = grid.narrow(axis + 1, 0, 1), grid.narrow(axis, 0, 1)
            right = edge - edge.narrow(axis + 1, 0, 1)
            small = 2 * (left.numel() + right.numel()) <= grid.numel()
            if small and float((left + right - grid).abs().max()) <= bound:
                return left, right
    return None
