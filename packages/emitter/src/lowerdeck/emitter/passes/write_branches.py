"""Pass: let the kernels of a branch write the results of the branch directly."""

from __future__ import annotations

from typing import Any

from lowerdeck.emitter.ir.graph import (
    Block,
    Call,
    Cond,
    Delegate,
    Method,
    all_blocks,
    blocks_of,
    substitute,
    substitute_reads,
)
from lowerdeck.emitter.ir.values import TensorValue, Value


def write_branches(method: Method) -> None:
    """Replace the results of both branches by one value that they write directly.

    Otherwise each branch ends with one copy for each result.

    Requires: Kernels are selected, views share memory. After this pass the IR is not in SSA form:
        results are written in both branches.

    Ensures:
        A branch copies a result only if it is computed outside, aliases other memory, or differs
        in layout.
    """
    for block in all_blocks(method.block):
        for operation in block.body:
            if isinstance(operation, Cond):
                for branch in operation.branches:
                    _write(branch, operation.outs)


def _write(branch: Block, outs: list[Value]) -> None:
    written = {
        value for operation in branch.body if _writes(operation) for value in operation.outs
    }
    replaced: dict[Value, Any] = {}
    for result, out in zip(branch.results, outs, strict=True):
        if result not in written or result in replaced:
            continue
        if isinstance(out, TensorValue) and _alike(result, out):
            replaced[result] = out
    if not replaced:
        return
    for block in all_blocks(branch):
        for operation in block.body:
            substitute_reads(operation, replaced)
            _rebase(operation.outs, replaced)
            if block is branch and not blocks_of(operation):
                operation.outs = [  # type: ignore[misc]
                    replaced.get(value, value) for value in operation.outs
                ]
        block.results = substitute(block.results, replaced)


def _writes(operation: object) -> bool:
    return isinstance(operation, Delegate) or (
        isinstance(operation, Call) and operation.kernel is not None
    )


def _rebase(outs: list[Value], replaced: dict[Value, Any]) -> None:
    for value in outs:
        if isinstance(value, TensorValue) and value.base in replaced:
            value.base = replaced[value.base]


def _alike(result: Any, out: TensorValue) -> bool:
    return (
        isinstance(result, TensorValue)
        and result.base is None
        and result.fixed_role is None
        and not result.dynamic
        and (result.dtype, result.sizes, result.dim_order, result.grows)
        == (out.dtype, out.sizes, out.dim_order, out.grows)
    )
