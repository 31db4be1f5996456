"""What this package uses of torch's private parts, each with a test of what is expected of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram

__all__ = [
    "OpOverload",
    "compile_package",
    "is_mutable",
    "load_package",
    "returns_alias",
    "schema_of",
    "upper_bound",
]

_LARGEST = 2**31 - 1


def upper_bound(size: int | torch.SymInt) -> int:
    """Return the largest number that a size can be, without a guard on it.

    Args:
        size: A number, or a symbol of an exported program.

    Returns:
        The number; the top of a symbol's range; or the symbol's value in the example inputs,
        where the range has no top.
    """
    if isinstance(size, int):
        return size
    symbol = size.node
    top = symbol.shape_env.bound_sympy(symbol.expr).upper
    # is_Integer: a number; torch's infinity of integers is is_integer, and finite, too.
    if top.is_Integer and int(top) <= _LARGEST:
        return int(top)
    return int(symbol.hint)


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """Return the schema of one overload of an operator."""
    schema: torch.FunctionSchema = op._schema
    return schema


def is_mutable(op: OpOverload) -> bool:
    """Return whether an operator writes to one of its arguments."""
    return bool(schema_of(op).is_mutable)


def returns_alias(op: OpOverload) -> bool:
    """Return whether a result can share memory with an argument that is only read."""
    returned = schema_of(op).returns
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returned)


def compile_package(program: ExportedProgram, path: Path) -> Path:
    """Compile a program to native code with AOTInductor.

    Args:
        program: The program.
        path: Where to write the package; its name ends in ``.pt2``.

    Returns:
        The path of the package.
    """
    # A partition has no example inputs of its own, and AOTInductor compiles for some.
    wanted = set(program.graph_signature.user_inputs)
    values = [node.meta["val"] for node in program.graph.nodes if node.name in wanted]
    program._example_inputs = (tuple(map(_example, values)), {})
    # AOTInductor's module costs seconds to import, and few need it.
    from torch._inductor import aoti_compile_and_package

    return Path(aoti_compile_and_package(program, package_path=str(path)))


def _example(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes = [_example(size) for size in value.shape]
        return torch.zeros(sizes, dtype=value.dtype)
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat)) else value


def load_package(path: Path) -> Callable[..., Any]:
    """Return the code of a package, loaded into this process.

    Args:
        path: A package of ``compile_package``.

    Returns:
        What calls it.
    """
    from torch._inductor import aoti_load_package

    loaded: Callable[..., Any] = aoti_load_package(str(path))
    return loaded
