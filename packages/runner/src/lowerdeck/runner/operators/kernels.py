"""Find kernels by operator name: torch, scalar and view operators."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, NamedTuple

import torch

from lowerdeck.runner._torch_private import (
    SchemaArgument,
    direct_call,
    find_overload,
    schema_arguments,
)
from lowerdeck.runner.operators.guards import guarded
from lowerdeck.runner.operators.prim_ops import SCALAR_OPERATORS
from lowerdeck.runner.operators.view_ops import VIEW_OPERATORS
from lowerdeck.serializer import (
    Bool,
    BoolList,
    Double,
    DoubleList,
    Int,
    IntList,
    KernelTypes,
    Null,
    OptionalTensorList,
    String,
    Tensor,
    TensorList,
    kernel_names,
    runtime_kernels,
)
from lowerdeck.torch_base import DTYPES, MEMORY_FORMATS

VIEW = "executorch_prim::et_view.default"
"""The only operator whose result aliases its input."""

COPY_INDEX = "executorch_prim::et_copy_index.tensor"
"""The only operator that writes one row of its result and keeps the others."""

_VALUE_TYPES: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor,),
    "int": (Int,),
    "float": (Double,),
    "bool": (Bool,),
    "number": (Int, Double, Bool),
    "str": (String,),
    "ScalarType": (Int,),
    "MemoryFormat": (Int,),
    "Layout": (Int,),
    "Device": (Int,),
    "List[int]": (IntList,),
    "List[float]": (DoubleList,),
    "List[bool]": (BoolList,),
    "List[Tensor]": (TensorList,),
    "List[Optional[Tensor]]": (OptionalTensorList, TensorList),
}
"""Value classes of the file that each schema type accepts."""


_TYPES_OF_LETTERS = {
    "T": "Tensor",
    "W": "Tensor",
    "b": "bool",
    "i": "int",
    "I": "List[int]",
    "J": "Optional[List[int]]",
}
"""Schema types of operators that torch does not have."""


class TorchKernel(NamedTuple):
    """Operator of torch.

    Attributes:
        name: Full name, such as ``aten::add.out``.
        call: The function; it takes out arguments by name.
        arguments: Arguments in schema order.
        in_place: Positions of arguments that may share memory with the result.
    """

    name: str
    call: Callable[..., Any]
    arguments: tuple[SchemaArgument, ...]
    in_place: Collection[int]


class ScalarKernel(NamedTuple):
    """Operator that returns a number, which is stored in the value after the arguments."""

    name: str
    call: Callable[..., Any]
    arity: int


class ViewKernel(NamedTuple):
    """Tensor operator of the runtime that torch does not have.

    Attributes:
        call: The function; its last argument is the spec of the written tensor.
        types: Schema types of the arguments.
        written: Position of the written argument.
        returns: Whether the call has one more value for the result.
    """

    name: str
    call: Callable[..., None]
    types: tuple[str, ...]
    written: int
    returns: bool

    @property
    def in_place(self) -> Collection[int]:
        """Return the positions of arguments that may share memory with the result."""
        return range(len(self.types))


Kernel = TorchKernel | ScalarKernel | ViewKernel


ALLOWED = kernel_names()
"""Operators that any file may call: those with kernels in the official runtime.

Torch has 1,600 more out variants, some of which open files or crash on wrong arguments; these need
the caller's permission.
"""


def find_kernel(name: str, overload: str, custom: Collection[str] = ()) -> Kernel | None:
    """Return the kernel of ``name.overload``, or None.

    Operators of torch that write no argument are rejected.

    Args:
        name: Namespace and name, such as ``aten::add``.
        overload: Overload name, empty for the default.
        custom: Full names of additionally allowed operators.
    """
    full_name = f"{name}.{overload}" if overload else name
    if full_name in SCALAR_OPERATORS:
        arity = len(runtime_kernels()[full_name].arguments)
        return ScalarKernel(full_name, SCALAR_OPERATORS[full_name], arity)
    if full_name in VIEW_OPERATORS:
        letters = runtime_kernels()[full_name].arguments
        # A view writes no bytes: it sets the address of its last argument.
        written = letters.index("W") if "W" in letters else len(letters) - 1
        types = tuple(_TYPES_OF_LETTERS[letter] for letter in letters)
        returns = not full_name.startswith("executorch_prim::")
        return ViewKernel(full_name, VIEW_OPERATORS[full_name], types, written, returns)
    if full_name not in ALLOWED and full_name not in custom:
        return None
    namespace, separator, short = name.partition("::")
    if not separator or not namespace.isidentifier() or not short.isidentifier():
        return None
    operator = find_overload(namespace, short, overload)
    if operator is None:
        return None
    arguments = schema_arguments(operator)
    if not any(argument.is_written for argument in arguments):
        return None
    in_place: Collection[int] = [
        place
        for place, argument in enumerate(arguments)
        if argument.is_written and not argument.is_out
    ]
    row = runtime_kernels().get(full_name)
    words = frozenset() if row is None else row.words
    if words & {"into_self", "first_in_place"}:
        in_place = (0,)
    elif "in_place" in words or short == "copy":
        in_place = range(len(arguments))
    call = direct_call(operator)
    if full_name == "aten::as_strided_copy.out":
        call = _from_first_element(call)
    return TorchKernel(full_name, guarded(full_name, call), arguments, in_place)


def _from_first_element(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call`` with offsets relative to the tensor's first element, as in the runtime.

    torch offsets are relative to the storage, which is the whole arena here.
    """

    @wraps(call)
    def strided(
        x: torch.Tensor, size: Any, stride: Any, offset: Any, *others: Any, **out: Any
    ) -> Any:
        start = None if offset is None else x.storage_offset() + offset
        return call(x, size, stride, start, *others, **out)

    return strided


def accepts(type_name: str, value: KernelTypes) -> bool:
    """Return whether ``value`` is valid for an argument of type ``type_name``.

    Args:
        type_name: Type in schema syntax, such as ``Optional[List[int]]``.
    """
    if type_name.startswith("Optional[") and not type_name.startswith("Optional[Tensor]]"):
        if isinstance(value, Null):
            return True
        type_name = type_name[len("Optional[") : -1]
    return isinstance(value, _VALUE_TYPES.get(type_name, (Null,)))


def converter(type_name: str) -> Callable[[Any], Any] | None:
    """Return a function from enum numbers of the file to torch values, or None for other types.

    Args:
        type_name: Type in schema syntax.
    """
    if "ScalarType" in type_name:
        return lambda number: None if number is None else DTYPES[number]
    if "MemoryFormat" in type_name:
        return lambda number: None if number is None else MEMORY_FORMATS[number]
    if "Layout" in type_name:
        return lambda number: None if number is None else torch.strided
    if "Device" in type_name:
        return lambda number: None if number is None else torch.device("cpu")
    return None
