"""Find operators by their name in the file: torch's own, scalar ones, view ones."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import wraps
from typing import Any

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
"""The one operator that makes its result share memory instead of writing to it."""

COPY_INDEX = "executorch_prim::et_copy_index.tensor"
"""The one operator that writes a row of its result and leaves the others."""

_KINDS: dict[str, tuple[type, ...]] = {
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


_TYPES_OF_LETTERS = {
    "T": "Tensor",
    "W": "Tensor",
    "b": "bool",
    "i": "int",
    "I": "List[int]",
    "J": "Optional[List[int]]",
}
"""Types as torch spells them, for the operators whose schemas torch does not have."""


@dataclass(frozen=True, slots=True)
class TorchKernel:
    """An operator of torch.

    Attributes:
        name: Full name, such as ``aten::add.out``.
        call: The function; out arguments by name.
        arguments: The arguments in schema order.
        in_place: Positions of the arguments whose bytes the result may overwrite.
    """

    name: str
    call: Callable[..., Any]
    arguments: tuple[SchemaArgument, ...]
    in_place: Collection[int]


@dataclass(frozen=True, slots=True)
class ScalarKernel:
    """An operator whose result is a number, written to a separate value."""

    name: str
    call: Callable[..., Any]
    arity: int


@dataclass(frozen=True, slots=True)
class ViewKernel:
    """A tensor operator of the runtime that torch does not have.

    Attributes:
        call: The function; the description of the written tensor comes last.
        types: Types of the arguments.
        written: Position of the argument that is written.
        returns: Whether the file adds one value for the result.
    """

    name: str
    call: Callable[..., None]
    types: tuple[str, ...]
    written: int
    returns: bool

    @property
    def in_place(self) -> Collection[int]:
        """Return the positions of the arguments whose bytes the result may overwrite."""
        return range(len(self.types))


Kernel = TorchKernel | ScalarKernel | ViewKernel


ALLOWED = kernel_names()
"""The operators of torch that any file may call: those that the official runtime has kernels for.

Torch has 1,600 more with an ``out`` argument, some of which open files or crash the process when
their arguments are wrong; those are called only where the caller names them.
"""


def find_kernel(name: str, overload: str, custom: Collection[str] = ()) -> Kernel | None:
    """Return the kernel of ``name.overload``, or None.

    Only operators that write to their arguments count: the runtime has no others.

    Args:
        name: Namespace and name, such as ``aten::add``.
        overload: Overload name; empty for the default one.
        custom: Full names of further operators that the caller allows.
    """
    full_name = f"{name}.{overload}" if overload else name
    if full_name in SCALAR_OPERATORS:
        arity = len(runtime_kernels()[full_name].arguments)
        return ScalarKernel(full_name, SCALAR_OPERATORS[full_name], arity)
    if full_name in VIEW_OPERATORS:
        letters = runtime_kernels()[full_name].arguments
        # A view writes no bytes: its last argument gets an address.
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
    """Return ``call`` with offsets relative to a tensor's first element, as in the runtime.

    torch counts from the start of the storage, which is the whole arena here.
    """

    @wraps(call)
    def strided(
        x: torch.Tensor, size: Any, stride: Any, offset: Any, *rest: Any, **out: Any
    ) -> Any:
        start = None if offset is None else x.storage_offset() + offset
        return call(x, size, stride, start, *rest, **out)

    return strided


def accepts(type_name: str, value: KernelTypes) -> bool:
    """Return whether an argument of the type ``type_name`` takes ``value``.

    Args:
        type_name: A type in the schema's spelling, such as ``Optional[List[int]]``.
        value: The value in the file.
    """
    if type_name.startswith("Optional[") and not type_name.startswith("Optional[Tensor]]"):
        if isinstance(value, Null):
            return True
        type_name = type_name[len("Optional[") : -1]
    return isinstance(value, _KINDS.get(type_name, (Null,)))


def converter(type_name: str) -> Callable[[Any], Any] | None:
    """Return a function from the number of an enumeration to torch's value, or None.

    Args:
        type_name: A type in the schema's spelling.
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
