"""Short descriptions of a method's values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lowerdeck.inspect.report.embed import Interned, clip, number
from lowerdeck.inspect.report.lifetimes import is_state
from lowerdeck.serializer import (
    Bool,
    BoolList,
    DeviceType,
    Double,
    DoubleList,
    EValue,
    ExecutionPlan,
    Int,
    IntList,
    KernelTypes,
    Null,
    OptionalTensorList,
    ScalarType,
    String,
    Tensor,
    TensorDataLocation,
    TensorList,
    TensorShapeDynamism,
)

_LONGEST_LIST = 16
_MOST_MEMBERS = 1024
_DTYPES = {
    ScalarType.BYTE: "uint8",
    ScalarType.CHAR: "int8",
    ScalarType.SHORT: "int16",
    ScalarType.INT: "int32",
    ScalarType.LONG: "int64",
    ScalarType.HALF: "float16",
    ScalarType.FLOAT: "float32",
    ScalarType.DOUBLE: "float64",
    ScalarType.COMPLEX_HALF: "complex32",
    ScalarType.COMPLEX_FLOAT: "complex64",
    ScalarType.COMPLEX_DOUBLE: "complex128",
    ScalarType.FLOAT8E5M2: "float8_e5m2",
    ScalarType.FLOAT8E4M3FN: "float8_e4m3fn",
    ScalarType.FLOAT8E5M2FNUZ: "float8_e5m2fnuz",
    ScalarType.FLOAT8E4M3FNUZ: "float8_e4m3fnuz",
}


def dtype_name(scalar_type: ScalarType) -> str:
    """Return torch's name of an element type, such as ``float32``."""
    return _DTYPES.get(scalar_type, scalar_type.name.lower())


def tensor_text(tensor: Tensor) -> str:
    """Return type and shape, such as ``float32[1, 3, 224, 224]``.

    A dynamic shape is ``float32 at most [1, 3, 224, 224]``: files do not store which sizes are
    dynamic.
    """
    bound = "" if tensor.shape_dynamism is TensorShapeDynamism.STATIC else " at most "
    sizes = ", ".join(map(str, tensor.sizes[:_LONGEST_LIST]))
    more = ", …" if len(tensor.sizes) > _LONGEST_LIST else ""
    return clip(f"{dtype_name(tensor.scalar_type)}{bound}[{sizes}{more}]")


def value_text(value: KernelTypes, values: Sequence[EValue]) -> str:
    """Return a short description of a value.

    Args:
        values: All values of the method, for members of lists.

    Returns:
        A tensor's type and shape, or a Python literal; tensors in lists are ``%index``.
    """
    match value:
        case Tensor():
            return tensor_text(value)
        case Null():
            return "None"
        case Int(whole):
            return str(whole)
        case Bool(truth):
            return str(truth)
        case Double(real):
            return repr(real)
        case String(text):
            return json.dumps(clip(text), ensure_ascii=False)
        case IntList(items):
            return _list([_int_at(item, values) for item in items[:_LONGEST_LIST]], len(items))
        case DoubleList(reals):
            return _list([repr(item) for item in reals[:_LONGEST_LIST]], len(reals))
        case BoolList(bools):
            return _list([str(item) for item in bools[:_LONGEST_LIST]], len(bools))
        case TensorList(tensors) | OptionalTensorList(tensors):
            parts = ["None" if item < 0 else f"%{item}" for item in tensors[:_LONGEST_LIST]]
            return _list(parts, len(tensors))


def values_table(plan: ExecutionPlan, texts: Interned[str]) -> dict[str, Any]:
    """Return the values of a method in columns, one entry for each value.

    Args:
        texts: Table of strings of the page; the columns hold indices into it.

    Returns:
        ``text``; ``name`` (-1 for none); ``role``, one letter: ``i`` input, ``o`` output,
        ``b`` both, ``c`` constant, ``x`` external constant, ``s`` state, ``t`` intermediate
        tensor, ``l`` list of tensors, ``-`` other; ``nbytes`` of tensors, 0 for others;
        ``note`` (-1 for none); ``members``, the values in each list of tensors.
    """
    inputs, outputs = frozenset(plan.inputs), frozenset(plan.outputs)
    text, name, role, nbytes, note = [], [], [], [], []
    members = {}
    for index, evalue in enumerate(plan.values):
        value = evalue.val
        text.append(texts.number_of(value_text(value, plan.values)))
        role.append(_role(value, index in inputs, index in outputs))
        label = _name(value)
        name.append(texts.number_of(clip(label)) if label else -1)
        nbytes.append(number(value.nbytes) if isinstance(value, Tensor) else 0)
        remark = _note(value)
        note.append(texts.number_of(remark) if remark else -1)
        if isinstance(value, TensorList | OptionalTensorList):
            members[str(index)] = [item for item in value.items if item >= 0][:_MOST_MEMBERS]
    return {
        "text": text,
        "name": name,
        "role": "".join(role),
        "nbytes": nbytes,
        "note": note,
        "members": members,
    }


def _list(parts: list[str], length: int) -> str:
    more = [f"… {length - len(parts)} more"] if length > len(parts) else []
    return clip(f"[{', '.join(parts + more)}]")


def _int_at(index: int, values: Sequence[EValue]) -> str:
    if 0 <= index < len(values) and isinstance(value := values[index].val, Int):
        return str(value.int_val)
    return f"%{index}"


def _name(value: KernelTypes) -> str | None:
    if isinstance(value, Tensor) and value.extra_tensor_info is not None:
        return value.extra_tensor_info.fully_qualified_name
    return None


def _role(value: KernelTypes, is_input: bool, is_output: bool) -> str:
    if is_input or is_output:
        return "b" if is_input and is_output else "i" if is_input else "o"
    if isinstance(value, TensorList | OptionalTensorList):
        return "l"
    if not isinstance(value, Tensor):
        return "-"
    extra = value.extra_tensor_info
    if value.allocation_info is not None:
        return "s" if is_state(value) else "t"
    if extra is not None and extra.location is TensorDataLocation.EXTERNAL:
        return "x"
    return "c" if value.data_buffer_idx > 0 else "t"


def _note(value: KernelTypes) -> str | None:
    """Return unusual properties of a tensor as text."""
    if not isinstance(value, Tensor):
        return None
    notes = []
    if value.dim_order != list(range(len(value.sizes))):
        notes.append(f"dim order {_list(list(map(str, value.dim_order[:16])), len(value.sizes))}")
    if value.shape_dynamism is not TensorShapeDynamism.STATIC:
        notes.append("dynamic shape")
    extra = value.extra_tensor_info
    if extra is not None and extra.device_type is not DeviceType.CPU:
        notes.append(f"on {extra.device_type.name} {extra.device_index}")
    return ", ".join(notes) or None
