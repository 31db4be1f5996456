"""What this package uses of torch's private parts, each with a test of what is expected of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from lowerdeck.torch_base import hint_of, set_program_parts

__all__ = [
    "compile_package",
    "load_package",
]


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
    set_program_parts(program, example_inputs=(tuple(map(_example, values)), {}))
    # AOTInductor's module costs seconds to import, and few need it.
    from torch._inductor import aoti_compile_and_package

    return Path(aoti_compile_and_package(program, package_path=str(path)))


def _example(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes = [_example(size) for size in value.shape]
        return torch.zeros(sizes, dtype=value.dtype)
    return hint_of(value)


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
