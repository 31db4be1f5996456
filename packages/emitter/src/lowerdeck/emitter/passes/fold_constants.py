"""Pass: constant folding and common subexpression elimination."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowerdeck.emitter.frontend.tensors import layout_of
from lowerdeck.emitter.ir.graph import (
    Block,
    Call,
    Method,
    Operation,
    WriteBack,
    blocks_of,
    substitute,
    substitute_reads,
    values_in,
)
from lowerdeck.emitter.ir.values import Role, ScalarValue, TensorValue, Value, root_of
from lowerdeck.torch_base import OpOverload, schema_of

# A folded result is stored in the file, so its size in bytes is limited.
_ALWAYS_UP_TO = 1024
# Folding uninitialized memory would make files nondeterministic.
_UNINITIALISED = ("empty", "resize")
# Operators that read state other than their arguments.
_READS_ELSEWHERE = frozenset({"aten::from_file"})
# Operators of other libraries may have effects that their schema does not declare.
_OWN_SPACES = frozenset({"aten", "prims"})


def is_repeatable(target: OpOverload) -> bool:
    """Return whether equal arguments give equal results, in every call and process."""
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    name = str(schema_of(target).name)
    space, _, short = name.partition("::")
    if space not in _OWN_SPACES or name in _READS_ELSEWHERE or schema_of(target).is_mutable:
        return False
    return not any(word in short for word in _UNINITIALISED)


def fold_constants(method: Method, stem_of: Callable[[str], str | None] | None = None) -> None:
    """Fold calls on constants, and merge equal calls on constants and sizes.

    Results of more than 1 KB are not folded. Calls with random results or side effects stay. Calls
    that read a weight of another file are not folded, because that file may be replaced.

    Args:
        method: The method, changed in place.
        stem_of: Returns the stem of the file of a parameter or buffer, None for the program
            itself.

    Requires:
        The method is functional.
    """
    folder = _Folder(stem_of)
    folder.block(method.block, {})
    method.outputs = substitute(method.outputs, folder.replaced)
    method.write_backs = [
        WriteBack(w.target, folder.replaced.get(w.source, w.source)) for w in method.write_backs
    ]


class _Folder:
    def __init__(self, stem_of: Callable[[str], str | None] | None) -> None:
        self._stem_of = stem_of
        self._fixed: set[Value] = set()
        self._of_sizes: set[Value] = set()
        self.replaced: dict[Value, Any] = {}

    def block(self, block: Block, values_by_key: dict[Any, list[Value]]) -> None:
        kept: list[Operation] = []
        for operation in block.body:
            substitute_reads(operation, self.replaced)
            for inner in blocks_of(operation):
                # Values of an inner block do not dominate the operations after it.
                self.block(inner, dict(values_by_key))
            if isinstance(operation, Call) and _fold_empty(operation):
                continue
            if isinstance(operation, Call) and self._is_fixed(operation):
                if self._folded(operation) or self._is_equal_to_earlier(operation, values_by_key):
                    continue
                self._fixed.update(operation.outs)
            elif isinstance(operation, Call) and self._is_of_sizes(operation):
                if self._is_equal_to_earlier(operation, values_by_key):
                    continue
                self._of_sizes.update(operation.outs)
            kept.append(operation)
        block.body = kept
        block.results = substitute(block.results, self.replaced)

    def _is_equal_to_earlier(self, call: Call, values_by_key: dict[Any, list[Value]]) -> bool:
        """Replace ``call`` by an equal earlier one and return True, or record it."""
        earlier = values_by_key.setdefault((call.target, _frozen(call.args)), call.outs)
        if earlier is call.outs:
            return False
        self.replaced |= zip(call.outs, earlier, strict=True)
        return True

    def _is_of_sizes(self, call: Call) -> bool:
        """Return whether ``call`` depends only on sizes, like position ids and attention masks."""
        return _is_foldable(call) and all(
            isinstance(value, ScalarValue) or value in self._of_sizes or self._known(value)
            for value in values_in(call.args)
        )

    def _is_fixed(self, call: Call) -> bool:
        varies = any(isinstance(out, TensorValue) and out.dynamic for out in call.outs)
        if varies or not _is_foldable(call):
            return False
        return all(self._known(value) for value in values_in(call.args))

    def _known(self, value: Value) -> bool:
        if not isinstance(value, TensorValue):
            return False
        return (value.constant is not None and not value.state) or value in self._fixed

    def _folded(self, call: Call) -> bool:
        tensors = [v for v in values_in(call.args) if isinstance(v, TensorValue)]
        if any(value.constant is None or self._is_external(value) for value in tensors):
            return False
        outs = [out for out in call.outs if isinstance(out, TensorValue)]
        size = sum(out.nbytes for out in outs)
        if size > _ALWAYS_UP_TO:
            return False
        results = call.target(**_named(call))
        results = list(results) if isinstance(results, (list, tuple)) else [results]
        for out, result in zip(outs, results, strict=True):
            out.constant = result.detach().contiguous()
            out.dim_order = layout_of(out.constant)
            out.fixed_role = Role.CONSTANT
        return True

    def _is_external(self, value: TensorValue) -> bool:
        root, _ = root_of(value)
        return bool(root.key) and self._stem_of is not None and self._stem_of(root.key) is not None


def _is_foldable(call: Call) -> bool:
    """Return whether ``call`` is repeatable and returns only tensors."""
    if not isinstance(call.target, OpOverload) or not is_repeatable(call.target):
        return False
    return bool(call.outs) and all(isinstance(out, TensorValue) for out in call.outs)


def _fold_empty(call: Call) -> bool:
    """Replace empty results by constants, as some kernels reject them; return whether it did."""
    if call.effect or not call.outs:
        return False
    for out in call.outs:
        if not isinstance(out, TensorValue) or out.dynamic or out.nbytes:
            return False
    for out in call.outs:
        assert isinstance(out, TensorValue)
        out.constant = torch.empty(out.sizes, dtype=out.dtype)
        out.fixed_role = Role.CONSTANT
    return True


def _named(call: Call) -> dict[str, Any]:
    arguments = schema_of(call.target).arguments
    return {
        a.name: _real(value)
        for value, a in zip(call.args, arguments, strict=True)
        if not a.kwarg_only or value is not None
    }


def _real(argument: Any) -> Any:
    if isinstance(argument, TensorValue):
        return argument.constant
    if isinstance(argument, (list, tuple)):
        return [_real(item) for item in argument]
    return argument


def _frozen(argument: Any) -> Any:
    if isinstance(argument, (TensorValue, ScalarValue)):
        return argument
    if isinstance(argument, (list, tuple)):
        return tuple(_frozen(item) for item in argument)
    # 1 == True == 1.0, but they are different arguments; NaN differs from itself.
    return (type(argument), repr(argument))
