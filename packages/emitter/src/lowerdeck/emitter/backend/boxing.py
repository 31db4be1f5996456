"""Convert Python arguments to the types of a kernel's schema."""

from __future__ import annotations

from typing import Any

import torch

from lowerdeck import torch_base
from lowerdeck.emitter.errors import UnsupportedError
from lowerdeck.emitter.ir.instructions import ListArg
from lowerdeck.emitter.ir.values import ScalarValue, TensorValue
from lowerdeck.serializer import (
    BoolList,
    DoubleList,
    IntList,
    OptionalTensorList,
    ScalarType,
    TensorList,
)

SCALAR_TYPES = {dtype: ScalarType(number) for dtype, number in torch_base.SCALAR_TYPES.items()}
_LISTS: dict[str, tuple[Any, Any]] = {
    "Tensor": (TensorList, None),
    "Optional[Tensor]": (OptionalTensorList, None),
    "float": (DoubleList, float),
    "number": (DoubleList, float),
    "bool": (BoolList, bool),
}
"""File-format class and item conversion for each list type of a schema."""
_MEMORY_FORMAT_NUMBERS = {form: number for number, form in torch_base.MEMORY_FORMATS.items()}


def box(argument: Any, kind: str) -> Any:
    """Convert ``argument`` to the schema type ``kind``.

    Args:
        argument: A value, a literal, or a list of those.
        kind: The type as torch prints it, such as ``"Optional[List[int]]"``.

    Returns:
        A ``Value``, None, bool, int, float, str, or ``ListArg``.
    """
    if kind.startswith("Optional["):
        if argument is None:
            return None
        kind = kind[len("Optional[") : -1]
    if kind.startswith("List["):
        items = tuple(argument) if isinstance(argument, (list, tuple)) else (argument,)
        list_kind, convert = _LISTS.get(kind[len("List[") : -1], (IntList, None))
        return ListArg(list_kind, items if convert is None else tuple(map(convert, items)))
    if isinstance(argument, (TensorValue, ScalarValue)) or argument is None:
        return argument
    if isinstance(argument, (list, tuple)):
        return box_untyped(argument)
    if kind == "float":
        return float(argument)
    return literal(argument)


def box_untyped(argument: Any) -> Any:
    """Convert ``argument`` by its own Python type, for kernels without a schema."""
    if isinstance(argument, (list, tuple)):
        tensors = argument and all(isinstance(item, TensorValue) for item in argument)
        return ListArg(TensorList if tensors else IntList, tuple(argument))
    if isinstance(argument, (TensorValue, ScalarValue)):
        return argument
    return literal(argument)


def literal(argument: Any) -> bool | int | float | str | None:
    """Return a literal argument as the runtime represents it: enumerations are integers.

    Raises:
        UnsupportedError: If the runtime has no counterpart.
    """
    if argument is None or isinstance(argument, (bool, int, float, str)):
        return argument
    if isinstance(argument, torch.dtype):
        if argument not in SCALAR_TYPES:
            raise UnsupportedError(
                f"the file format has no scalar type for the operator argument {argument}: keep "
                "tensors of that dtype as torch.uint8 in the model, or give the node to a delegate"
            )
        return int(SCALAR_TYPES[argument])
    if isinstance(argument, torch.memory_format):
        return _MEMORY_FORMAT_NUMBERS[argument]
    if isinstance(argument, torch.layout):
        return 0
    if isinstance(argument, torch.device):
        # The runtime has no device arguments; every kernel takes None.
        return None
    raise UnsupportedError(
        f"the argument {argument!r} of type {type(argument).__name__} has no counterpart in a "
        "program; expected None, a number, text, dtype, layout, memory format or device"
    )
