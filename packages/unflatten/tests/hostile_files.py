"""Saved programs in which every name and every line of metadata is the text of an attacker."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, export, save

WORD = "evilword"
"""Part of every name of the model, where the attacker's text is put later."""


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module(f"m{WORD}", nn.Linear(2, 2))
        self.register_parameter(f"p{WORD}", nn.Parameter(torch.randn(2)))
        self.register_buffer(f"b{WORD}", torch.zeros(2))

    def forward(self, evilword: Tensor, scale: Any) -> Any:
        buffer = getattr(self, f"b{WORD}")
        buffer.add_(1)
        inner = getattr(self, f"m{WORD}")
        return {
            f"r{WORD}": inner(evilword) * scale[f"s{WORD}"] + getattr(self, f"p{WORD}") * buffer
        }


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module(f"i{WORD}", Inner())

    def forward(self, evilword: Tensor, given: Any, **options: Tensor) -> Any:
        inner = getattr(self, f"i{WORD}")
        x = inner(evilword, {f"s{WORD}": given[f"d{WORD}"]})[f"r{WORD}"]
        with torch.no_grad():
            y = x.relu()
        x = inner(y + x, {f"s{WORD}": options[f"k{WORD}"]})[f"r{WORD}"]
        return {f"o{WORD}": x}


def arguments(text: str) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Return arguments of the model whose names carry ``text``."""
    return (torch.ones(1, 2), {f"d{text}": torch.full((2,), 2.0)}), {f"k{text}": torch.ones(2)}


def program(*, preserve: bool) -> ExportedProgram:
    """Return the model as a program."""
    args, kwargs = arguments(WORD)
    preserved = (f"i{WORD}",) if preserve else ()
    return export(Outer(), args, kwargs, preserve_module_call_signature=preserved)


def hostile_file(exported: ExportedProgram, text: str) -> bytes:
    """Return the program as saved, with ``text`` in every name and every line of metadata."""
    buffer = io.BytesIO()
    save(exported, buffer)
    made = io.BytesIO()
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith(".json"):
                data = json.dumps(_rewritten(json.loads(data), text)).encode()
            new.writestr(name, data)
    return made.getvalue()


# torch.export.load generates code from the names of values, which are not ours to check.
_TEXTS = {
    "stack_trace",
    "nn_module_stack",
    "torch_fn",
    "from_node",
    "source_fn_stack",
    "parameter_name",
    "buffer_name",
    "fqn",
    "forward_arg_names",
    "as_string",
    "param_name",
}


def _rewritten(value: Any, text: str, key: str = "") -> Any:
    if isinstance(value, dict):
        # Names of values are also keys; names of weights are read from one other file.
        renamed = text if key == "config" else WORD
        return {
            name.replace(WORD, renamed): _rewritten(item, text, name)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_rewritten(item, text, key) for item in value]
    if not isinstance(value, str):
        return value
    if key == "stack_trace":
        # Each part of a frame, and a trace that is none at all.
        frame = f'File "{WORD}", line 1, in {WORD}\n    {WORD}\n'
        plain = f'File "model.py", line 1, in forward\n    x {WORD}\n'
        value = f"{frame}{WORD}\n{plain}{value}\n{frame}{plain}"
    if key in {"torch_fn", "from_node", "source_fn_stack"}:
        value += WORD
    if key == "nn_module_stack":
        # Also types.
        value = value.replace("Inner", f"Inner{WORD}")
    if key in {"in_spec", "out_spec"}:
        # JSON within JSON within JSON.
        return value.replace(WORD, json.dumps(json.dumps(text)[1:-1])[1:-1])
    return value.replace(WORD, text) if key in _TEXTS else value
