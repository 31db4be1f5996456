"""Decompose programs into operators that have kernels."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.export import ExportedProgram

from lowerdeck import decompose as tracing
from lowerdeck.emitter.config import EmitConfig
from lowerdeck.emitter.errors import DecompositionError, EmitterError, UnsupportedError
from lowerdeck.emitter.frontend.provenance import Provenance
from lowerdeck.emitter.ir.assertions import is_assertion
from lowerdeck.emitter.ir.kernel_lookup import find_kernel
from lowerdeck.emitter.ir.kernels import KernelTable
from lowerdeck.torch_base import (
    HigherOrderOperator,
    OpOverload,
    changed_constant,
    executorch_call_delegate,
    plain_number,
    pytree,
    schema_of,
    varies,
    with_parts,
)

Table: TypeAlias = Mapping[Any, Callable[..., Any]]
# Higher-order operators whose subgraph a retrace inlines.
_INLINED = frozenset({"wrap_with_set_grad_enabled", "wrap_with_autocast", "invoke_subgraph"})


def decompose(exported: ExportedProgram, settings: EmitConfig) -> ExportedProgram:
    """Return a program decomposed to operators that have kernels, as far as there are rules.

    The given program is unchanged.

    A program that needs no decomposition is returned as is: retracing takes most of the time.

    Args:
        exported: Any exported program: training IR, core ATen, with delegates or without.

    Raises:
        DecompositionError: If torch or a rule fails, or a rule specializes a dynamic size.
        UnsupportedError: If an in-place write affects an alias, or writes several values to one
            element; or a constant was changed after export.
    """
    changed = changed_constant(exported)
    if changed is not None:
        raise UnsupportedError(f"{changed}: re-export the module, or restore its constant")
    calls = Provenance(exported).nodes
    if all(node.target in (operator.getitem, executorch_call_delegate) for node in calls):
        return exported
    # Imported late: a program of delegates needs no rules.
    from lowerdeck.emitter.decompositions.quirks import RANGES
    from lowerdeck.emitter.decompositions.table import all_rules, own_rules

    ranges = RANGES.set(exported.range_constraints)
    try:
        rules = own_rules(settings, complex_numbers=has_complex_numbers(exported))
        if not needs_decomposition(exported, rules, settings.table):
            return exported
        return _decomposed(exported, *all_rules(rules, settings))
    finally:
        RANGES.reset(ranges)


def _decomposed(exported: ExportedProgram, rules: Table, composites: Table) -> ExportedProgram:
    varying = _varying_sizes(exported)
    try:
        parts = tracing.decompose_graph(exported, tracing.Rules(rules, composites, by_result=True))
        _check_sizes(varying)
    except EmitterError:
        raise
    except tracing.DecomposeError as error:
        raise UnsupportedError(str(error)) from error
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise DecompositionError(
            f"torch cannot decompose the program into operators that have kernels: "
            f"{type(error).__name__}: {reason}. The cause above names the line of the model; "
            "rewrite it, or decompose the program yourself before emitting"
        ) from error
    # ``ExportedProgram(...)`` rejects a valid graph in which two buffers get the same new value.
    return with_parts(
        exported,
        graph_module=parts.graph_module,
        graph_signature=parts.graph_signature,
        state_dict=dict(parts.state_dict),
        constants=dict(parts.constants),
    )


def _varying_sizes(exported: ExportedProgram) -> list[tuple[str, int, torch.SymInt]]:
    """Return the dynamic dimensions of the inputs: name, position, size."""
    return [
        (node.name, dim, size)
        for node in exported.graph.nodes
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)
        for dim, size in enumerate(node.meta["val"].shape)
        if varies(size)
    ]


def _check_sizes(varying: list[tuple[str, int, torch.SymInt]]) -> None:
    """Check that tracing has specialized no dimension: the program would run for one size only."""
    for name, dim, size in varying:
        if not varies(size):
            raise DecompositionError(
                f"a decomposition has specialized dimension {dim} of input {name!r} to "
                f"{plain_number(size)}, which should be dynamic: it read the size as a number; "
                "export without dynamic_shapes for it, or decompose the program yourself"
            )


def needs_decomposition(exported: ExportedProgram, rules: Table, kernels: KernelTable) -> bool:
    """Return whether any operator of ``exported`` needs a decomposition.

    Args:
        rules: Rules that apply even if there is a kernel.
    """
    return any(_must_decompose(node, rules, kernels) for node in Provenance(exported).nodes)


def _must_decompose(node: fx.Node, rules: Table, kernels: KernelTable) -> bool:
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return target.__name__ in _INLINED
    if not isinstance(target, OpOverload) or is_assertion(target):
        return False
    if schema_of(target).is_mutable:
        return True
    rule = rules.get(target)
    if rule is not None and not tracing.declines(rule, node):
        return True
    return find_kernel(target, kernels)[0] is None


def has_complex_numbers(exported: ExportedProgram) -> bool:
    """Return whether any node of ``exported`` may return a complex tensor."""
    return any(
        isinstance(value, torch.Tensor) and (value.is_complex() or "fft" in str(node.target))
        for node in (*exported.graph.nodes, *Provenance(exported).nodes)
        for value in pytree.tree_leaves(node.meta.get("val"))
    )
