"""Pass: let ``bmm`` read matrices as stored instead of repeated or transposed copies.

Attention multiplies by all keys and values of a cache. Grouped-query models repeat them for each
head first (``repeat_kv``) and transpose the keys: two copies of the whole cache per token.
Instead, the rows of heads that share a matrix become one left operand, by a view; and ``a @ b.T``
is the transpose of ``b @ a.T``, where ``a`` and the product are small for few tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch

from lowerdeck.emitter.ir.graph import Call, Method, Operation, all_blocks, reads_of, values_in
from lowerdeck.emitter.ir.values import TensorValue, Value, contiguous_order

_ATEN = torch.ops.aten
_VIEW, _PERMUTE = _ATEN.view_copy.default, _ATEN.permute_copy.default
_MIN_REUSE = 32
"""From this number of multiplications per copied element on, the copy is cheap."""
_VIEWS = frozenset({"view", "unsqueeze", "squeeze", "clone", "alias", "detach"})


class _Matrices(NamedTuple):
    """Right operand of a ``bmm`` before the calls that repeat and transpose it.

    Attributes:
        repeats: Consecutive repeats of each matrix in the batch (``repeat_kv``).
        steps: The views and scalings after the repeat, in order, with the sizes that their results
            have if no call transposes.
        is_transposed: Whether each matrix is transposed.
    """

    source: TensorValue
    repeats: int
    steps: list[tuple[Call, list[int]]]
    is_transposed: bool


def group_products(method: Method) -> None:
    """Let batched products read matrices directly instead of repeated or transposed copies.

    Requires:
        Run-time numbers are computed by kernels, small constants are folded.

    Ensures:
        Repeated and transposed copies that only a batched product reads are dead where the rewrite
        pays.
    """
    readers = Counter(
        [*values_in(method.outputs), *(write_back.source for write_back in method.write_backs)]
    )
    for block in all_blocks(method.block):
        readers.update(values_in(block.results))
        for operation in block.body:
            readers.update(reads_of(operation))
    for block in all_blocks(method.block):
        # Look only within a block: loop-invariant values stay outside of the loop.
        producers: dict[Value, Call] = {}
        body: list[Operation] = []
        for operation in block.body:
            if isinstance(operation, Call):
                producers.update(dict.fromkeys(operation.outs, operation))
                if operation.target is _ATEN.bmm.default:
                    matrices = _find_matrices(operation, producers, readers)
                    if matrices is not None:
                        body += _rewrite(operation, matrices)
                        continue
            body.append(operation)
        block.body = body


def _find_matrices(
    product: Call, producers: Mapping[Value, Call], readers: Mapping[Value, int]
) -> _Matrices | None:
    """Return the right operand before repeats and transposes; None if a rewrite does not pay."""
    left, value = product.args
    if not left.contiguous or not isinstance(left.shape[0], int):
        return None
    is_transposed, steps = False, list[tuple[Call, list[int]]]()
    # Walk backwards; the batch is all dimensions but the last two.
    while (call := producers.get(value)) is not None and readers[value] == 1 and call.args:
        source = call.args[0]
        if not isinstance(source, TensorValue) or len(call.outs) != 1 or source.rank < 3:
            break
        if (
            source.dtype != value.dtype
            or not _is_static_contiguous(source)
            or not _is_static_contiguous(value)
        ):
            break
        if call.view_name == "expand" and source.sizes != value.sizes:
            count, matrix = value.sizes[-3], value.sizes[-2:]
            fits = all(sizes[-3] % count == 0 for _, sizes in steps) if count > 1 else False
            if not fits or source.sizes != (*value.sizes[:-3], 1, *matrix):
                break
            return _Matrices(source, count, steps[::-1], is_transposed)
        if call.view_name == "permute":
            if is_transposed or call.order != _transposed(range(source.rank)):
                break
            is_transposed = True
            steps = [(view, _transposed(sizes)) for view, sizes in steps]
        elif call.view_name in _VIEWS or _is_scaling(call):
            if source.sizes[-2:] != value.sizes[-2:]:
                break
            steps.append((call, [*value.sizes]))
        elif call.view_name != "expand":
            break
        value = source
    pays = is_transposed and _should_transpose_left(product, value)
    return _Matrices(value, 1, steps[::-1], is_transposed) if pays else None


def _is_static_contiguous(value: TensorValue) -> bool:
    return value.contiguous and not value.dynamic


def _is_scaling(call: Call) -> bool:
    return call.op_name == "mul" and isinstance(call.args[1], int | float)


def _transposed(items: Any) -> list[int]:
    *before, rows, columns = items
    return [*before, columns, rows]


def _should_transpose_left(product: Call, matrices: TensorValue) -> bool:
    """Return whether to transpose the left operand and the product instead of the matrices."""
    left, out = product.args[0], product.outs[0]
    assert isinstance(left, TensorValue)
    assert isinstance(out, TensorValue)
    if left.dynamic:
        # Copying the rows scales with the product; copying the matrices costs the same even for a
        # single row.
        return min(matrices.sizes[-2:]) >= _MIN_REUSE
    return prod(left.sizes) + prod(out.sizes) < prod(matrices.sizes)


def _rewrite(product: Call, right: _Matrices) -> list[Operation]:
    """Return the calls of the product that reads ``right.source`` directly."""
    origin, count, body = product.origin, right.repeats, list[Operation]()

    def call(
        target: Any, source: TensorValue, argument: Any, sizes: Any, rows: Any
    ) -> TensorValue:
        """Append a unary call; ``rows`` is the dynamic dimension and its size."""
        shape = [*sizes]
        shape[rows[0]] = rows[1]
        name, order = f"{source.name}.{len(body)}", contiguous_order(len(sizes))
        result = TensorValue(name, source.dtype, tuple(shape), tuple(sizes), order)
        body.append(Call(target, [source, argument], [result], origin))
        return result

    matrices = right.source
    for step, sizes in right.steps:
        unrepeated = [*sizes[:-3], sizes[-3] // count, *sizes[-2:]]
        is_scaling = _is_scaling(step)
        target, argument = (step.target, step.args[1]) if is_scaling else (_VIEW, unrepeated)
        matrices = call(target, matrices, argument, unrepeated, (0, unrepeated[0]))
    left, (out,) = product.args[0], product.outs
    assert isinstance(out, TensorValue)
    (batch, max_rows, inner), width = left.sizes, out.sizes[2]
    rows = left.shape[1] * count
    batch, max_rows = batch // count, max_rows * count
    if count > 1:
        view_shape = [batch, rows if isinstance(rows, int) else -1, inner]
        left = call(_VIEW, left, view_shape, (batch, max_rows, inner), (1, rows))
    if right.is_transposed and _should_transpose_left(product, matrices):
        left = call(_PERMUTE, left, [0, 2, 1], (batch, inner, max_rows), (2, rows))
        value = call(product.target, matrices, left, (batch, width, max_rows), (2, rows))
        value = call(_PERMUTE, value, [0, 2, 1], (batch, max_rows, width), (1, rows))
    else:
        if right.is_transposed:
            matrices = call(_PERMUTE, matrices, [0, 2, 1], (batch, inner, width), (0, batch))
        value = call(product.target, left, matrices, (batch, max_rows, width), (1, rows))
    last = body[-1]
    assert isinstance(last, Call)
    if count > 1:
        view_shape = [out.sizes[0], out.shape[1] if isinstance(out.shape[1], int) else -1, width]
        body.append(Call(_VIEW, [value, view_shape], [out], origin))
    else:
        last.outs = [out]
    return body
