"""Pass: convert operands that kernels reject to tensors, other dtypes or other shapes.

Each rule works around a fault of a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lowerdeck.emitter._torch_private import overload_packet
from lowerdeck.emitter.ir.graph import Call, Method, Operation
from lowerdeck.emitter.ir.kernel_lookup import out_variant
from lowerdeck.emitter.ir.kernels import KernelTable
from lowerdeck.emitter.ir.values import Role, ScalarValue, TensorValue
from lowerdeck.emitter.passes.rewriting import Rule, by_target, cast, rewrite
from lowerdeck.torch_base import OpOverload, overload_name, schema_of, size_range, varies

_ATEN = torch.ops.aten
# Without uint8, which some operators take as masks.
_NARROW = frozenset({torch.int8, torch.int16, torch.int32})
_NARROW_OR_BYTE = _NARROW | {torch.uint8}
_END = 2**63 - 1
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float32}


def legalize_operands(method: Method, table: KernelTable) -> None:
    """Rewrite calls whose operands their kernels reject.

    Ensures:
        No number is passed where the schema has a tensor.
    """
    apply = by_target({**_RULES, _ATEN.roll.default: partial(_roll, method.ranges)})

    def rule(call: Call, before: list[Operation]) -> Sequence[Operation] | None:
        if isinstance(call.target, OpOverload):
            _legalize_scalars(call, table, before)
        return apply(call, before)

    rewrite(method, rule)


def _legalize_scalars(call: Call, table: KernelTable, before: list[Operation]) -> None:
    """Replace numbers that are passed where the schema has a tensor.

    ``x + 2`` is traced as ``add.Tensor(x, 2)``. The ``Scalar`` overload is called if the runtime
    has it; otherwise the number becomes a 0-dim constant.
    """
    for index, argument in enumerate(schema_of(call.target).arguments):
        operand = call.args[index]
        if str(argument.type) != "Tensor" or isinstance(operand, TensorValue):
            continue
        if index == 1 and (scalar := _scalar_overload(call.target, table)) is not None:
            call.target = scalar
            return
        call.args[index] = _scalar_tensor(operand, call, before)


def _scalar_overload(target: OpOverload, table: KernelTable) -> OpOverload | None:
    """Return the ``Scalar`` overload, or None if the runtime has no kernel for it."""
    packet = overload_packet(target)
    name = overload_name(target).replace("Tensor", "Scalar")
    if name == overload_name(target) or not hasattr(packet, name):
        return None
    overload: OpOverload = getattr(packet, name)
    names = [argument.name for argument in schema_of(target).arguments]
    if [argument.name for argument in schema_of(overload).arguments] != names:
        return None
    variant = out_variant(overload)
    return overload if variant is not None and variant.full_name in table else None


def _scalar_tensor(operand: Any, call: Call, before: list[Operation]) -> TensorValue:
    name = f"{call.outs[0].name}.number" if call.outs else "number"
    is_computed = isinstance(operand, ScalarValue)
    kind = operand.kind if is_computed else type(operand)
    value = TensorValue(name, _DTYPES[kind], (), (), ())
    if is_computed:
        args = [operand, *[None] * 4]
        before.append(Call(_ATEN.scalar_tensor.default, args, [value], call.origin))
        return value
    value.constant = torch.tensor(operand, dtype=value.dtype)
    value.fixed_role = Role.CONSTANT
    return value


def _cast_to(value: TensorValue, dtype: torch.dtype, before: list[Operation]) -> TensorValue:
    converted = value.like(f"{value.name}.{str(dtype).removeprefix('torch.')}")
    converted.dtype = dtype
    before.append(cast(value, converted))
    return converted


def _int64_index(position: int, narrow: frozenset[torch.dtype] = _NARROW) -> Rule:
    """Return a rule for a kernel that takes only int64 indices."""

    def rule(call: Call, before: list[Operation]) -> None:
        operand = call.args[position]
        if isinstance(operand, (list, tuple)):
            call.args[position] = [_to_int64(item, narrow, before) for item in operand]
        else:
            call.args[position] = _to_int64(operand, narrow, before)

    return rule


def _to_int64(value: Any, narrow: frozenset[torch.dtype], before: list[Operation]) -> Any:
    if isinstance(value, TensorValue) and value.dtype in narrow:
        return _cast_to(value, torch.int64, before)
    return value


def _cast_before_scalar(call: Call, before: list[Operation]) -> None:
    """Cast the tensor first: the kernel rejects an integer tensor with a floating number.

    It also rejects a bool tensor with an integer.
    """
    tensor, (out,) = call.args[0], call.outs
    if not isinstance(out, TensorValue) or tensor.dtype.is_floating_point:
        return
    if out.dtype.is_floating_point or (tensor.dtype is torch.bool and out.dtype is not torch.bool):
        call.args[0] = _cast_to(tensor, out.dtype, before)


def _cast_before_item(call: Call, before: list[Operation]) -> None:
    """Cast the tensor first: ``_local_scalar_dense`` does not support half precision."""
    tensor = call.args[0]
    if tensor.dtype in (torch.float16, torch.bfloat16):
        call.args[0] = _cast_to(tensor, torch.float32, before)


def _copy_zero_dim(call: Call, _before: list[Operation]) -> list[Operation] | None:
    """Replace a reduction or scan of a 0-dim tensor by a copy: its kernel aborts."""
    source, out = call.args[0], call.outs[0]
    if source.rank != 0 or not isinstance(out, TensorValue):
        return None
    return [cast(source, out, call.origin)]


def _sum_after_product(call: Call, before: list[Operation]) -> list[Operation] | None:
    """Split ``addmm`` of half precision into ``mm``, which accumulates in float32, and ``add``."""
    bias, left, right, beta, alpha = call.args
    out: Any = call.outs[0]
    if out.dtype not in (torch.float16, torch.bfloat16):
        return None
    product: Any = out.like(f"{out.name}.product")
    if beta != 1:
        scaled = bias.like(f"{bias.name}.scaled")
        before.append(Call(_ATEN.mul.Scalar, [bias, beta], [scaled], None))
        bias = scaled
    before.append(Call(_ATEN.mm.default, [left, right], [product], None))
    total = Call(_ATEN.add.Tensor, [bias, product, alpha], [out], call.origin)
    return _scaled_before_sum(total, before) or [total]


def _scaled_before_sum(call: Call, before: list[Operation]) -> list[Operation] | None:
    """Multiply by alpha first: the kernel scales a first operand of one element instead."""
    first, other, alpha = call.args
    if alpha == 1 or any(size != 1 for size in first.shape if isinstance(size, int)):
        return None
    out: Any = call.outs[0]
    if other.dtype != out.dtype:
        other = _cast_to(other, out.dtype, before)
    scaled = other.like(f"{other.name}.scaled")
    before.append(Call(_ATEN.mul.Scalar, [other, alpha], [scaled], None))
    return [Call(_ATEN.add.Tensor, [first, scaled, 1], call.outs, call.origin)]


def _roll(
    ranges: Mapping[Any, Any], call: Call, _before: list[Operation]
) -> list[Operation] | None:
    """Replace a roll of dynamic sizes by slices and a concatenation, which are much faster.

    The rule does not apply if a size may be less than its shift.
    """
    result, shifts, dims = call.args
    out: Any = call.outs[0]
    calls: list[Operation] = []
    for shift, dim in zip(shifts, dims, strict=True):
        axis, size = dim % out.rank, out.shape[dim]
        is_fixed = not isinstance(shift, int) or not varies(size)
        if is_fixed or size_range(size, ranges)[0] < abs(shift):
            return None
        parts = []
        for start, end, is_rest in ((-shift, _END, shift <= 0), (0, -shift, shift > 0)):
            part = result.like(f"{out.name}.{len(calls)}")
            part.shape, part.sizes = (
                (*old[:axis], old[axis] - abs(shift) if is_rest else abs(shift), *old[axis + 1 :])
                for old in (result.shape, result.sizes)
            )
            args = [result, axis, start, end, 1]
            calls.append(Call(_ATEN.slice.Tensor, args, [part], call.origin))
            parts.append(part)
        result = out if len(calls) + 1 == 3 * len(dims) else out.like(f"{out.name}.{len(calls)}")
        calls.append(Call(_ATEN.cat.default, [parts, axis], [result], call.origin))
    return calls


_RULES: dict[Any, Rule] = {
    _ATEN.gather.default: _int64_index(2, _NARROW_OR_BYTE),
    _ATEN.index_select.default: _int64_index(2),
    _ATEN.scatter.src: _int64_index(2),
    _ATEN.scatter.value: _int64_index(2),
    _ATEN.scatter_add.default: _int64_index(2),
    _ATEN.index.Tensor: _int64_index(1),
    _ATEN.index_put.default: _int64_index(1),
    _ATEN.add.Tensor: _scaled_before_sum,
    _ATEN.add.Scalar: _cast_before_scalar,
    _ATEN.sub.Scalar: _cast_before_scalar,
    _ATEN.rsub.Scalar: _cast_before_scalar,
    _ATEN.addmm.default: _sum_after_product,
    _ATEN.sum.dim_IntList: _copy_zero_dim,
    _ATEN.cumsum.default: _copy_zero_dim,
    _ATEN._local_scalar_dense.default: _cast_before_item,
}
