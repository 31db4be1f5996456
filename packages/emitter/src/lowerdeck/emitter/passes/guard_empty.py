"""Pass: guard kernels that fail on zero-element tensors.

If a dimension is 0, some kernels return without writing their output, resize it wrongly, or abort
the process.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from lowerdeck.emitter.ir.graph import Block, Call, Cond, Method, Operation
from lowerdeck.emitter.ir.kernel_lookup import find_kernel
from lowerdeck.emitter.ir.kernels import KernelTable
from lowerdeck.emitter.ir.values import ScalarValue, TensorValue
from lowerdeck.emitter.passes.rewriting import rewrite
from lowerdeck.torch_base import size_range

_ATEN = torch.ops.aten
Size: TypeAlias = tuple[TensorValue, int]
"""A tensor and one of its dimensions."""


class _Empty(NamedTuple):
    """Result of a call on empty tensors.

    Attributes:
        sizes: Sizes of the inputs; the result applies if any of them is 0.
        shape: For each dimension of the result, the terms that add up to its size.
        value: Fill value of the result.
    """

    sizes: Sequence[Size]
    shape: Sequence[Sequence[Size | int]]
    value: float | bool = 0


_Rule: TypeAlias = Callable[[Call], "_Empty | None"]


def guard_empty(method: Method, table: KernelTable) -> None:
    """Fill the output instead of running a kernel that fails because a dimension is 0."""

    def rule(call: Call, before: list[Operation]) -> Sequence[Operation] | None:
        guard = _RULES.get(call.target) if call.kernel is not None else None
        empty = None if guard is None else guard(call)
        if empty is None:
            return None
        doubtful = [size for size in empty.sizes if size_range(_size(size), method.ranges)[0] == 0]
        _guard(call, empty, doubtful, before, table)
        return ()

    rewrite(method, rule)


def _guard(
    call: Call, empty: _Empty, doubtful: list[Size], body: list[Operation], table: KernelTable
) -> None:
    """Append ``call`` to ``body``, inside a branch if its input may be empty."""
    filled = Block()
    if not doubtful:
        body.append(call)
        return
    if any(isinstance(_size(size), int) for size in doubtful):
        _fill(call, empty, filled, table)
        body += filled.body
        return
    maker = _Numbers(call, body, table)
    product: Any = maker.size(doubtful[0])
    for size in doubtful[1:]:
        product = maker.call(operator.mul, [product, maker.size(size)])
    nothing = maker.call(operator.eq, [product, 0], bool)
    _fill(call, empty, filled, table)
    # Both branches write the outputs, so nothing is copied after them.
    filled.results = list(call.outs)
    body.append(Cond(nothing, (filled, Block([call], list(call.outs))), call.outs, call.origin))


def _fill(call: Call, empty: _Empty, block: Block, table: KernelTable) -> None:
    """Append operations to ``block`` that write the output of ``call`` without its kernel."""
    maker = _Numbers(call, block.body, table)
    (out,) = call.outs
    assert isinstance(out, TensorValue)
    shape = [maker.sum(parts) for parts in empty.shape]
    args = [shape, empty.value, out.dtype, None, None, None]
    maker.add(Call(_ATEN.full.default, args, [out], call.origin))


class _Numbers:
    """Builder of calls that compute sizes at run time."""

    def __init__(self, call: Call, body: list[Operation], table: KernelTable) -> None:
        self._call, self._body, self._table = call, body, table

    def add(self, call: Call) -> None:
        call.kernel, _ = find_kernel(call.target, self._table)
        self._body.append(call)

    def call(self, target: Any, args: list[Any], kind: type = int) -> ScalarValue:
        number = ScalarValue(f"{self._call.outs[0].name}.size", kind)
        self.add(Call(target, args, [number], self._call.origin))
        return number

    def size(self, size: Size) -> Any:
        fixed = _size(size)
        return fixed if isinstance(fixed, int) else self.call(_ATEN.sym_size.int, list(size))

    def sum(self, parts: Sequence[Size | int]) -> Any:
        number, varying = 0, []
        for part in parts:
            term = part if isinstance(part, (int, ScalarValue)) else self.size(part)
            if isinstance(term, int):
                number += term
            else:
                varying.append(term)
        if not varying:
            return number
        total = varying[0]
        for other in (*varying[1:], *([number] if number else [])):
            total = self.call(operator.add, [total, other])
        return total


def _size(size: Size) -> Any:
    tensor, dim = size
    return tensor.shape[dim]


def _all_sizes(tensor: TensorValue) -> list[Size]:
    return [(tensor, dim) for dim in range(tensor.rank)]


def _matrix_product(call: Call) -> _Empty:
    """Fill with zeros: the kernel does not write its output for an empty sum."""
    left, right = call.args[:2]
    columns = (right, 0 if call.op_name == "linear" else right.rank - 1)
    rows = [[size] for size in _all_sizes(left)[:-1]]
    return _Empty([(left, left.rank - 1)], [*rows, [columns]])


def _linear(call: Call) -> _Empty | None:
    """Fill with zeros if there is no bias; with one, the kernel initializes the output."""
    return _matrix_product(call) if call.args[2] is None else None


def _extreme(call: Call) -> _Empty | None:
    """Fill with the smallest or largest value: the kernel aborts the process."""
    source, dims, keep = call.args
    if source.rank == 0:
        return None
    (out,) = call.outs
    assert isinstance(out, TensorValue)
    reduced = {dim % source.rank for dim in dims} if dims else set(range(source.rank))
    shape: list[Sequence[Size | int]] = []
    for size in _all_sizes(source):
        if size[1] not in reduced:
            shape.append([size])
        elif keep:
            shape.append([1])
    return _Empty(_all_sizes(source), shape, _limit(out.dtype, least=call.op_name == "amax"))


def _limit(dtype: torch.dtype, *, least: bool) -> float | bool:
    if dtype is torch.bool:
        return not least
    if dtype.is_floating_point:
        return float("-inf" if least else "inf")
    info = torch.iinfo(dtype)
    return int(info.min if least else info.max)


def _like_input(call: Call) -> _Empty:
    """Set the shape of the result: the kernel divides by a size, which aborts the process."""
    sizes = _all_sizes(call.args[0])
    return _Empty(sizes, [[size] for size in sizes])


def _concatenation(call: Call) -> _Empty:
    """Set the shape of the result: the kernel leaves empty tensors out of the size of ``dim``."""
    pieces, dim = call.args
    # ``cat`` ignores tensors of shape (0,).
    whole = [piece for piece in pieces if piece.rank != 1 or piece.sizes != (0,)] or pieces
    first = whole[0]
    dim %= first.rank
    others = [size for size in _all_sizes(first) if size[1] != dim]
    shape: list[Sequence[Size | int]] = [[size] for size in _all_sizes(first)]
    shape[dim] = [(piece, dim) for piece in whole]
    return _Empty(others, shape)


def _padding(call: Call) -> _Empty:
    """Fill with the padding value: the kernel rejects an inner dimension of size 0."""
    source, pad, value = call.args
    shape: list[Sequence[Size | int]] = [[size] for size in _all_sizes(source)]
    for index in range(0, len(pad), 2):
        dim = source.rank - 1 - index // 2
        shape[dim] = [(source, dim), pad[index], pad[index + 1]]
    return _Empty(_all_sizes(source), shape, value)


_RULES: dict[Any, _Rule] = {
    _ATEN.mm.default: _matrix_product,
    _ATEN.bmm.default: _matrix_product,
    _ATEN.linear.default: _linear,
    _ATEN.amax.default: _extreme,
    _ATEN.amin.default: _extreme,
    _ATEN._log_softmax.default: _like_input,
    _ATEN.cat.default: _concatenation,
    _ATEN.constant_pad_nd.default: _padding,
}
