"""Pass: remove operations whose results are unread."""

from __future__ import annotations

from lowerdeck.emitter.ir.graph import (
    Block,
    Call,
    Method,
    Operation,
    Scan,
    While,
    blocks_of,
    reads_of,
    values_in,
)
from lowerdeck.emitter.ir.values import TensorValue, Value


def drop_dead_code(method: Method) -> None:
    """Remove operations without a reader, including whole loops and branches.

    Requires:
        The method is functional, and calls with side effects are marked.

    Ensures:
        Every call without a side effect writes a value that is read, returned or written back.
    """
    live: set[Value] = set(values_in(method.outputs))
    for write_back in method.write_backs:
        live |= {write_back.source, write_back.target}
    _sweep(method.block, live)


def _sweep(block: Block, live: set[Value]) -> None:
    """Remove dead code in ``block``; add the values that live operations read to ``live``."""
    live.update(values_in(block.results))
    kept: list[Operation] = []
    for operation in reversed(block.body):
        if not any(out in live for out in operation.outs) and not _has_effect(operation):
            continue
        _mark(operation, live)
        kept.append(operation)
    block.body = kept[::-1]


def _has_effect(operation: Operation) -> bool:
    if isinstance(operation, Call):
        return operation.effect
    return any(_has_effect(inner) for block in blocks_of(operation) for inner in block.body)


def _mark(operation: Operation, live: set[Value]) -> None:
    for inner in blocks_of(operation):
        _sweep(inner, live)
    if isinstance(operation, (While, Scan)):
        live.update(operation.carried)
    if isinstance(operation, Call):
        for out in operation.outs:
            if isinstance(out, TensorValue) and out.base is not None:
                live.add(out.base)
    live.update(reads_of(operation))
