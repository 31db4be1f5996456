"""Pass: remove no-op copies and views, and merge chains of views."""

from __future__ import annotations

from typing import Any

import torch

from lowerdeck.emitter.ir.graph import (
    Block,
    Call,
    Method,
    Operation,
    WriteBack,
    blocks_of,
    substitute,
    substitute_reads,
)
from lowerdeck.emitter.ir.values import TensorValue, Value
from lowerdeck.torch_base import expression_of

_MAY_CHANGE_NOTHING = frozenset(
    {
        *("alias", "clone", "detach", "expand", "lift_fresh", "_to", "view", "slice"),
        "_clone_dim_order",
    }
)


def remove_copies(method: Method) -> None:
    """Replace results that equal their source by the source, and merge chains of views.

    This is safe because nothing is overwritten before the write-backs at the end, which preserve
    old values that are still needed.

    Requires:
        Layouts are decided; the method is functional.

    Ensures:
        No call copies a tensor to the same type, shape and layout.
    """
    replaced: dict[Value, Any] = {}
    _sweep(method.block, replaced, {})
    method.outputs = substitute(method.outputs, replaced)
    method.write_backs = [
        WriteBack(w.target, replaced.get(w.source, w.source)) for w in method.write_backs
    ]


def _sweep(block: Block, replaced: dict[Value, Any], producers: dict[Value, Call]) -> None:
    kept: list[Operation] = []
    for operation in block.body:
        substitute_reads(operation, replaced)
        for inner in blocks_of(operation):
            _sweep(inner, replaced, producers)
        if isinstance(operation, Call):
            _join(operation, producers)
            same = _pairs_of(operation, producers)
            if same is not None or _changes_nothing(operation):
                replaced[operation.outs[0]] = _changed(operation) if same is None else same
                continue
            for out in operation.outs:
                producers[out] = operation
        kept.append(operation)
    block.body = kept
    block.results = substitute(block.results, replaced)


def _join(call: Call, producers: dict[Value, Call]) -> None:
    """Merge a view or permutation into ``call``, which reads it and is one as well."""
    name = call.view_name
    if name not in ("permute", "view"):
        return
    before = producers.get(call.args[0])
    if before is None or before.view_name != name:
        return
    if name == "permute":
        call.args = [before.args[0], [before.order[dim] for dim in call.order]]
    elif call.outs[0].dtype == before.args[0].dtype:  # type: ignore[union-attr]
        call.args = [before.args[0], *call.args[1:]]


def _pairs_of(call: Call, producers: dict[Value, Call]) -> Value | None:
    """Return the pairs of real numbers if ``call`` undoes their conversion to complex numbers."""
    if call.view_name != "view_as_real":
        return None
    before = producers.get(call.args[0])
    if before is None or before.op_name != "view_as_complex":
        return None
    pairs: Value = before.args[0]
    return pairs


def _changed(call: Call) -> Any:
    """Return the argument that a no-op call copies, or None."""
    if call.op_name == "bitwise_and" and _is_all_true(call.args[0]):
        return call.args[1]
    return call.args[0] if call.args else None


def _is_all_true(value: Any) -> bool:
    constant = value.constant if isinstance(value, TensorValue) else None
    if constant is None or value.state or value.key:
        return False
    return constant.dtype == torch.bool and bool(constant.all())


def _changes_nothing(call: Call) -> bool:
    if len(call.outs) != 1:
        return False
    source, out = _changed(call), call.outs[0]
    if not isinstance(source, TensorValue) or not isinstance(out, TensorValue):
        return False
    if source.dtype != out.dtype or source.dim_order != out.dim_order:
        return False
    if not _same_shape(source, out):
        return False
    if call.view_name == "permute":
        return call.order == list(range(source.rank))
    if call.op_name == "add":
        # A float that is -0 would become 0.
        return (
            type(call.args[1]) is int and call.args[1] == 0 and not source.dtype.is_floating_point
        )
    # A slice of the full length.
    return call.view_name in _MAY_CHANGE_NOTHING or source is not call.args[0]


def _same_shape(left: TensorValue, right: TensorValue) -> bool:
    """Return whether two shapes are equal for all sizes, comparing symbolic expressions."""
    if left.sizes != right.sizes:
        return False
    return [*map(expression_of, left.shape)] == [*map(expression_of, right.shape)]
