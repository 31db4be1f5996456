"""Move exported programs to the CPU.

``torch.export.passes.move_to_device_pass`` (2.13) mutates its argument, separates tensors that
share memory, replaces devices by strings and loses offsets of views.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.decompose.errors import DecomposeError, WholeProgramError
from lowerdeck.torch_base import (
    FakeTensor,
    copy_graph_module,
    graphs_of,
    pytree,
    set_program_parts,
    storage_identity,
    with_parts,
)

_CPU = torch.device("cpu")


def on_cpu(exported_program: ExportedProgram) -> ExportedProgram:
    """Return a program as if it had been exported on the CPU.

    Values, weights, example inputs and device arguments are moved; shared memory stays shared.
    Autocast depends on the device, so programs with autocast regions are decomposed first, with an
    empty table.

    Args:
        exported_program: A program from ``torch.export``; not changed, and returned itself if it
            is on the CPU.

    Raises:
        DecomposeError: A value is a sparse or quantized tensor, or an autocast region cannot be
            decomposed or needs an unavailable device.
    """
    return methods_on_cpu({"forward": exported_program})["forward"]


def methods_on_cpu(programs: Mapping[str, ExportedProgram]) -> dict[str, ExportedProgram]:
    """Return programs as ``on_cpu`` does; memory shared between programs stays shared.

    Args:
        programs: Programs by name, such as the methods of a file.

    Raises:
        DecomposeError: As in ``on_cpu``.
    """
    tensors = _MovedTensors()
    return {name: _moved_program(program, tensors) for name, program in programs.items()}


def _moved_program(program: ExportedProgram, tensors: _MovedTensors) -> ExportedProgram:
    tensors_of_program = (*program.state_dict.values(), *program.constants.values())
    used = (
        value
        for node in _nodes(program)
        for value in (node.meta.get("val"), *node.args, *node.kwargs.values())
    )
    if all(map(_is_on_cpu, tensors_of_program)) and all(map(_is_on_cpu, used)):
        return program
    # Imported late: programs on the CPU, nearly all, do not need these modules.
    from lowerdeck.decompose._torch_private import fake_mode_of
    from lowerdeck.decompose.calls.facts import TensorFacts
    from lowerdeck.decompose.decomposing import decompose

    autocasts = [node for node in _nodes(program) if "autocast" in str(node.target)]
    for device, _, is_enabled, *_ in (node.args for node in autocasts if len(node.args) > 2):
        if is_enabled and not torch.get_device_module(str(device)).is_available():
            # torch would disable autocast with a warning, which changes dtypes.
            raise DecomposeError(
                f"an autocast region needs {device}, which is not available: decompose the "
                "program where it was exported"
            )
    if autocasts:
        program = decompose(program, {})
    moved = with_parts(program, graph_module=copy_graph_module(program.graph_module))
    mode = fake_mode_of(moved.graph_module)

    def moved_value(value: Any) -> Any:
        if _is_on_cpu(value):
            return value
        if isinstance(value, torch.device):
            return _CPU
        if value.is_conj():
            return moved_value(value.conj()).conj()
        try:
            return replace(TensorFacts.of(value), device=_CPU).input_fake(mode)
        except WholeProgramError as error:
            raise DecomposeError(f"{error}: export the module after module.cpu()") from error

    for node in _nodes(moved):
        node.args = pytree.tree_map(moved_value, node.args)
        node.kwargs = pytree.tree_map(moved_value, dict(node.kwargs))
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(moved_value, node.meta["val"])
    for gm in graphs_of(moved.graph_module):
        # Device arguments are part of the generated code.
        gm.recompile()
    set_program_parts(
        moved,
        state_dict={name: tensors.of(value) for name, value in program.state_dict.items()},
        constants={name: tensors.of(value) for name, value in program.constants.items()},
        example_inputs=pytree.tree_map(tensors.of, program.example_inputs),
    )
    return moved


def _nodes(program: ExportedProgram) -> Iterator[Node]:
    for gm in graphs_of(program.graph_module):
        yield from gm.graph.nodes


def _is_on_cpu(value: Any) -> bool:
    # Called for every value of every program; pytree is slower.
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu"
    if isinstance(value, (tuple, list)):
        return all(map(_is_on_cpu, value))
    if isinstance(value, dict):
        return all(map(_is_on_cpu, value.values()))
    return not isinstance(value, torch.device) or value.type == "cpu"


class _MovedTensors:
    """CPU copies of tensors, which share memory as the originals do."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        # Keeps storages alive, because their ids are keys.
        self._originals: list[torch.Tensor] = []

    def of(self, value: Any) -> Any:
        """Return a tensor on the CPU, or other values unchanged."""
        if _is_on_cpu(value):
            return value
        identity = storage_identity(value)
        if identity is None or isinstance(value, FakeTensor) or value.is_conj() or value.is_neg():
            return value.to(_CPU)
        if identity not in self._storages:
            self._storages[identity] = value.untyped_storage().cpu()
            self._originals.append(value)
        moved = torch.empty(0, dtype=value.dtype)
        moved.set_(self._storages[identity], value.storage_offset(), value.shape, value.stride())
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(moved, requires_grad=value.requires_grad)
        return moved.requires_grad_(value.requires_grad)
