"""Everything private in torch that this package stands on, so that a new torch breaks one file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch._export.verifier import SpecViolationError
from torch._higher_order_ops.executorch_call_delegate import (
    executorch_call_delegate as _executorch_call_delegate,
)
from torch._library.fake_class_registry import FakeScriptObject
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry
from torch.export.graph_signature import ExportGraphSignature
from torch.utils import _pytree as pytree

__all__ = [
    "FakeScriptObject",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "SpecViolationError",
    "active_fake_mode",
    "bare_program",
    "executorch_call_delegate",
    "fake_mode_of",
    "pytree",
    "schema_of",
    "set_program_parts",
]

# The same object, with a type that checkers need not infer.
executorch_call_delegate: HigherOrderOperator = _executorch_call_delegate


def schema_of(target: object) -> torch.FunctionSchema | None:
    """Return the schema of one overload of an operator, of any dialect; None for anything else."""
    schema: torch.FunctionSchema | None = getattr(target, "_schema", None)
    return schema


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


def set_program_parts(
    program: ExportedProgram,
    *,
    graph_module: torch.fx.GraphModule | None = None,
    signature: ExportGraphSignature | None = None,
    state_dict: dict[str, Any] | None = None,
    constants: dict[str, Any] | None = None,
    module_call_graph: list[ModuleCallEntry] | None = None,
    verifiers: list[type] | None = None,
) -> None:
    """Replace parts of ``program`` in place; what is None stays."""
    for name, value in {
        "_graph_module": graph_module,
        "_graph_signature": signature,
        "_state_dict": state_dict,
        "_constants": constants,
        "_module_call_graph": module_call_graph,
        "_verifiers": verifiers,
    }.items():
        if value is not None:
            setattr(program, name, value)


def bare_program(
    graph_module: torch.fx.GraphModule,
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
    """
    program = cls.__new__(cls)
    program._graph_module = graph_module
    program._graph_signature = signature
    program._state_dict = state_dict
    program._constants = constants
    program._range_constraints = dict(range_constraints)
    program._module_call_graph = module_call_graph
    program._example_inputs = example_inputs
    program._verifiers = verifiers
    program._guards_code = []
    return program
