"""The code of a tree of modules, for people to read."""

from __future__ import annotations

from textwrap import indent

import torch

from lowerdeck.unflatten.calls.python_names import is_name, on_one_line
from lowerdeck.unflatten.modules.generated_module import GeneratedModule

NO_CODE = "pass\n"
"""The code of a module that computes nothing itself."""


def print_readable(module: torch.nn.Module, kind: str, print_output: bool) -> str:
    """Return the code of ``module`` and of every module below it, as classes.

    Args:
        module: The outermost module.
        kind: What to call it.
        print_output: Whether to print the text too.
    """
    parts: list[str] = []
    for path, inner in module.named_modules():
        whole = _type_of(inner)
        name = whole.rpartition(".")[2]
        shown = name if is_name(name) else kind
        parts.append(f"class {shown}(torch.nn.Module):  # {on_one_line(path or kind)}: {whole}")
        # By the class: the model may have children or state of these names.
        code = (
            GeneratedModule.code.__get__(inner) if isinstance(inner, GeneratedModule) else NO_CODE
        )
        parts.append(indent(code, "    "))
    text = "\n".join(parts)
    if print_output:
        print(text)
    return text


def tree_summary(module: torch.nn.Module) -> str:
    """Return one line for each module: its name, eager's type and the size of its own state."""
    lines = []
    for path, inner in module.named_modules():
        own = [*inner.parameters(recurse=False), *inner.buffers(recurse=False)]
        size = sum(tensor.numel() for tensor in own)
        depth = path.count(".") + 1 if path else 0
        name = on_one_line(path.rpartition(".")[2]) or "(root)"
        lines.append(
            f"{'  ' * depth}{name}: {_type_of(inner)}" + (f", {size} elements" if size else "")
        )
    return "\n".join(lines)


def _type_of(module: torch.nn.Module) -> str:
    found = GeneratedModule.type_name(module) if isinstance(module, GeneratedModule) else None
    return on_one_line(str(found or type(module).__name__))
