"""Everything private in torch that this package needs, so that a new torch breaks one file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch._export.verifier import SpecViolationError
from torch._library.fake_class_registry import FakeScriptObject
from torch.export import ExportedProgram, ModuleCallEntry
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule

from lowerdeck.torch_base import FakeTensor, FakeTensorMode, pytree, set_program_parts

__all__ = [
    "bare_program",
    "FakeScriptObject",
    "SpecViolationError",
    "active_fake_mode",
    "fake_mode_of",
]


def active_fake_mode() -> FakeTensorMode | None:
    """Return the fake mode that the running operator is under, or None."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return cast("FakeTensorMode | None", mode)


def fake_mode_of(values: object) -> FakeTensorMode | None:
    """Return the fake mode that the fake tensors among ``values`` belong to, or None."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, FakeTensor):
            return leaf.fake_mode
    return None


def bare_program(
    graph_module: GraphModule,
    signature: ExportGraphSignature,
    *,
    state_dict: dict[str, Any],
    constants: dict[str, Any],
    range_constraints: Mapping[Any, Any],
    module_call_graph: list[ModuleCallEntry],
    verifiers: list[type],
    example_inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    cls: type[ExportedProgram] = ExportedProgram,
) -> ExportedProgram:
    """Return a program of exactly these parts, neither copied, nor generated anew, nor verified.

    ``ExportedProgram(...)`` generates code, converts guards and verifies each time it is called;
    for a thousand partitions of one program that is work for nothing: the whole is verified once.

    Args:
        graph_module: The graph module.
        signature: What describes its inputs and outputs.
        state_dict: Parameters and buffers.
        constants: Lifted tensors, buffers that no state dict has, and objects.
        range_constraints: The range of each symbol.
        module_call_graph: How modules were called.
        verifiers: What checks it.
        example_inputs: Positional and named inputs.
        cls: The class of the program.
    """
    program = cls.__new__(cls)
    program._range_constraints = dict(range_constraints)
    program._guards_code = []
    program._example_inputs = example_inputs
    set_program_parts(
        program,
        graph_module=graph_module,
        signature=signature,
        state_dict=state_dict,
        constants=constants,
        module_call_graph=module_call_graph,
        verifiers=verifiers,
    )
    return program
