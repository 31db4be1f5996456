"""Apply rewrite rules to the calls of a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from lowerdeck.emitter.ir.graph import Call, Method, Operation, all_blocks
from lowerdeck.emitter.ir.values import TensorValue

Rule: TypeAlias = Callable[[Call, list[Operation]], Sequence[Operation] | None]
"""Takes a call and the list of operations before it; may change the call and append to the list.
Returns the replacement, or None to keep the call.
"""


def rewrite(method: Method, rule: Rule) -> None:
    """Apply a rule to the calls of all blocks of a method, in place."""
    for block in list(all_blocks(method.block)):
        body: list[Operation] = []
        for operation in block.body:
            replaced = rule(operation, body) if isinstance(operation, Call) else None
            body += [operation] if replaced is None else replaced
        block.body = body


def by_target(rules: Mapping[Any, Rule]) -> Rule:
    """Return a rule that dispatches on each call's target."""

    def rule(call: Call, before: list[Operation]) -> Sequence[Operation] | None:
        rewrite = rules.get(call.target)
        return None if rewrite is None else rewrite(call, before)

    return rule


def cast(value: TensorValue, result: TensorValue, origin: Any = None) -> Call:
    """Return the call that computes ``result`` by casting ``value`` to its dtype."""
    args = [value, result.dtype, None, None, None, False, None]
    return Call(torch.ops.aten._to_copy.default, args, [result], origin)
