"""Pass: compute run-time numbers with kernels on numbers or on zero-dimensional tensors."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from lowerdeck.emitter.ir.graph import Call, Method, Operation
from lowerdeck.emitter.ir.values import ScalarValue, TensorValue, Value
from lowerdeck.emitter.passes.rewriting import Rule, by_target, rewrite
from lowerdeck.torch_base import OpOverload, schema_of

_ATEN = torch.ops.aten
# Longer chains of products are computed by ``pow`` on tensors.
_MOST_FACTORS = 64


def compute_numbers(method: Method) -> None:
    """Rewrite functions on numbers for which the runtime has no kernel."""
    rewrite(method, by_target(_RULES))


def _number(
    target: Any, args: list[Any], kind: type, call: Call, before: list[Operation]
) -> ScalarValue:
    """Append a function on numbers to ``before``; return its result."""
    name = f"{call.outs[0].name}.{getattr(target, '__name__', 'part')}"
    number = ScalarValue(name, kind)
    before.append(Call(target, args, [number], call.origin))
    return number


def _kind(argument: Any) -> type:
    return argument.kind if isinstance(argument, ScalarValue) else type(argument)


def _become(call: Call, target: Any, *args: Any) -> None:
    call.target, call.args = target, list(args)


def _unequal(call: Call, before: list[Operation]) -> None:
    same = _number(operator.eq, call.args, bool, call, before)
    _become(call, torch.sym_not, same)


def _logical(call: Call, _before: list[Operation]) -> None:
    left, right = call.args
    if _kind(left) is bool and _kind(right) is bool:
        cases = (right, False) if call.target is operator.and_ else (True, right)
        _become(call, torch.sym_ite, left, *cases)


def _floor(call: Call, before: list[Operation]) -> None:
    turned = _number(operator.neg, call.args, _kind(call.args[0]), call, before)
    above = _number(math.ceil, [turned], int, call, before)
    _become(call, operator.neg, above)


def _rounded(call: Call, _before: list[Operation]) -> None:
    if len(call.args) == 2 and call.args[1] is None:
        call.args = call.args[:1]


def _total(call: Call, before: list[Operation]) -> None:
    terms = list(call.args[0])
    while len(terms) > 2:
        terms[:2] = [_number(operator.add, terms[:2], int, call, before)]
    _become(call, operator.add, *(terms if len(terms) == 2 else [*terms, 0]))


def _power(call: Call, before: list[Operation]) -> None:
    base, exponent = call.args
    if isinstance(exponent, int) and 2 <= exponent <= _MOST_FACTORS:
        product = base
        for _ in range(exponent - 2):
            product = _number(operator.mul, [product, base], _kind(base), call, before)
        _become(call, operator.mul, product, base)
        return
    # Only tensors have such a kernel.
    if isinstance(exponent, ScalarValue):
        exact_base: Any = base
        target: Any = _ATEN.pow.Scalar
        if isinstance(base, ScalarValue):
            exact_base, target = _tensor(base, call, before), _ATEN.pow.Tensor_Tensor
        args = [exact_base, _tensor(exponent, call, before)]
    else:
        args, target = [_tensor(base, call, before), exponent], _ATEN.pow.Tensor_Scalar
    _item(_computed(target, args, call, before), call, before)


def _root(call: Call, before: list[Operation]) -> None:
    """Compute a square root with the tensor kernel: there is none for numbers."""
    args = [_tensor(call.args[0], call, before)]
    _item(_computed(_ATEN.sqrt.default, args, call, before), call, before)


def _tensor(number: Any, call: Call, before: list[Operation]) -> TensorValue:
    return _computed(_ATEN.scalar_tensor.default, [number, *[None] * 4], call, before)


def _computed(
    target: OpOverload,
    args: list[Any],
    call: Call,
    before: list[Operation],
    dtype: torch.dtype = torch.float64,
) -> TensorValue:
    name = f"{call.outs[0].name}.{schema_of(target).name.partition('::')[2]}"
    result = TensorValue(name, dtype, (), (), ())
    outs: list[Value] = [result]
    before.append(Call(target, args, outs, call.origin))
    return result


def _item(result: TensorValue, call: Call, before: list[Operation]) -> None:
    """Change ``call`` to read its result from a tensor."""
    if _kind(call.outs[0]) is int:
        args = [result, torch.int64, None, None, None, False, None]
        result = _computed(_ATEN._to_copy.default, args, call, before, torch.int64)
    _become(call, _ATEN._local_scalar_dense.default, result)


_RULES: dict[Any, Rule] = {
    operator.ne: _unequal,
    operator.and_: _logical,
    operator.or_: _logical,
    math.floor: _floor,
    operator.pow: _power,
    round: _rounded,
    torch.sym_sum: _total,
    torch.sym_sqrt: _root,
}
