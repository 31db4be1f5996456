"""Pass: remove run-time assertions and size constraints, which the runtime has no kernels for."""

from __future__ import annotations

from lowerdeck.emitter.ir.assertions import is_assertion
from lowerdeck.emitter.ir.graph import Call, Method, all_blocks


def drop_assertions(method: Method) -> None:
    """Remove every assertion from ``method``.

    Requires:
        Nothing.

    Ensures:
        No call asserts or constrains anything.
    """
    for block in all_blocks(method.block):
        block.body = [
            operation
            for operation in block.body
            if not (isinstance(operation, Call) and is_assertion(operation.target))
        ]
