"""Pass: give a kernel that wants a tensor a tensor, where the graph has a number."""

from __future__ import annotations

from typing import Any

import torch

from lowerdeck.emitter._torch_private import overload_packet
from lowerdeck.emitter.ir.graph import Call, Method, Operation, all_blocks
from lowerdeck.emitter.ir.kernels import KernelTable
from lowerdeck.emitter.ir.overloads import out_variant
from lowerdeck.emitter.ir.values import Role, ScalarValue, TensorValue
from lowerdeck.torch_base import OpOverload, overload_name, schema_of

_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float32}


def legalize_scalars(method: Method, table: KernelTable) -> None:
    """Exchange numbers that are where the schema wants a tensor.

    ``x + 2`` is traced as ``add.Tensor(x, 2)``. The ``Scalar`` overload is called where the
    runtime has it; otherwise the number becomes a 0-dim constant.

    Requires:
        Nothing.

    Ensures:
        No number is where the schema wants a tensor.
    """
    for block in all_blocks(method.block):
        body: list[Operation] = []
        for operation in block.body:
            if isinstance(operation, Call) and isinstance(operation.target, OpOverload):
                _legalize(operation, table, body)
            body.append(operation)
        block.body = body


def _legalize(call: Call, table: KernelTable, before: list[Operation]) -> None:
    for index, argument in enumerate(schema_of(call.target).arguments):
        given = call.args[index]
        if str(argument.type) != "Tensor" or isinstance(given, TensorValue):
            continue
        if index == 1 and (scalar := _scalar_overload(call.target, table)) is not None:
            call.target = scalar
            return
        call.args[index] = _as_tensor(given, call, before)


def _scalar_overload(target: OpOverload, table: KernelTable) -> OpOverload | None:
    """Return the overload that takes a number second, if the runtime has it."""
    packet = overload_packet(target)
    name = overload_name(target).replace("Tensor", "Scalar")
    if name == overload_name(target) or not hasattr(packet, name):
        return None
    found: OpOverload = getattr(packet, name)
    names = [argument.name for argument in schema_of(target).arguments]
    if [argument.name for argument in schema_of(found).arguments] != names:
        return None
    variant = out_variant(found)
    return found if variant is not None and variant.full_name in table else None


def _as_tensor(given: Any, call: Call, before: list[Operation]) -> TensorValue:
    name = f"{call.outs[0].name}.number" if call.outs else "number"
    if isinstance(given, ScalarValue):
        value = TensorValue(name, _DTYPES[given.kind], (), (), ())
        target = torch.ops.aten.scalar_tensor.default
        args = [given, *[None] * (len(schema_of(target).arguments) - 1)]
        before.append(Call(target, args, [value], call.origin))
        return value
    value = TensorValue(name, _DTYPES[type(given)], (), (), ())
    value.constant = torch.tensor(given, dtype=value.dtype)
    value.fixed_role = Role.CONSTANT
    return value
