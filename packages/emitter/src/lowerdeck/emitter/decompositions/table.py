"""The table of decompositions, and the check whether a program needs them."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from lowerdeck.decompose import DecomposeError, Rules, declines, decompose_graph, keep_whole
from lowerdeck.emitter._torch_private import reference_decomposition
from lowerdeck.emitter.config import EmitConfig
from lowerdeck.emitter.decompositions.antialiasing import ANTIALIASING
from lowerdeck.emitter.decompositions.attention import attention
from lowerdeck.emitter.decompositions.complex_numbers import COMPLEX_NUMBERS
from lowerdeck.emitter.decompositions.experts import expert_rules
from lowerdeck.emitter.decompositions.grids import GRIDS
from lowerdeck.emitter.decompositions.integers import INTEGERS
from lowerdeck.emitter.decompositions.layouts import keeping_layouts
from lowerdeck.emitter.decompositions.norms import BATCH_NORMS, NORMS
from lowerdeck.emitter.decompositions.ordering import ORDERING
from lowerdeck.emitter.decompositions.pools import POOLS
from lowerdeck.emitter.decompositions.quantization import quantization_rules
from lowerdeck.emitter.decompositions.quirks import QUIRKS, RANGES
from lowerdeck.emitter.decompositions.random_numbers import RANDOM_NUMBERS
from lowerdeck.emitter.decompositions.running import RUNNING
from lowerdeck.emitter.decompositions.scatter_reductions import SCATTER_REDUCTIONS
from lowerdeck.emitter.decompositions.sums import HALF_SUMS, SUMS
from lowerdeck.emitter.decompositions.volumes import VOLUMES, conv3d
from lowerdeck.emitter.errors import DecompositionError, EmitterError, UnsupportedError
from lowerdeck.emitter.frontend.provenance import Provenance
from lowerdeck.emitter.ir.assertions import is_assertion
from lowerdeck.emitter.ir.kernel_lookup import find_kernel
from lowerdeck.emitter.ir.kernels import KernelTable
from lowerdeck.torch_base import (
    HigherOrderOperator,
    OperatorBase,
    OpOverload,
    changed_constant,
    composite_parts,
    core_decompositions,
    plain_number,
    pytree,
    schema_of,
    varies,
    with_parts,
)

_ATEN = torch.ops.aten

# Composite operators that the runtime runs as one kernel, mostly faster than their parts.
_KEPT = (
    _ATEN.linear.default,
    _ATEN.glu.default,
    _ATEN.logit.default,
    _ATEN.pixel_shuffle.default,
    _ATEN.pixel_unshuffle.default,
    _ATEN.roll.default,
    _ATEN.stack.default,
    _ATEN.tril.default,
    _ATEN.var_mean.correction,
    _ATEN.floor_divide.default,
    _ATEN.masked_fill.Scalar,
    _ATEN.replication_pad1d.default,
    _ATEN.upsample_bilinear2d.vec,
    _ATEN.upsample_nearest2d.vec,
)
_ATTENTION = _ATEN.scaled_dot_product_attention.default

# Higher-order operators whose subgraph a retrace inlines.
_INLINED = frozenset({"wrap_with_set_grad_enabled", "wrap_with_autocast", "invoke_subgraph"})
# Operators without a kernel that torch has a decomposition for, but does not apply by default.
_REFERENCES = (
    _ATEN.linalg_vector_norm.default,
    # Batch norm in training mode.
    _ATEN._native_batch_norm_legit_functional.default,
    _ATEN._batch_norm_with_update_functional.default,
    _ATEN.tril_indices.default,
    _ATEN.triu_indices.default,
)

_CONV3D = _ATEN.conv3d.default

# Our own rules, which take precedence over torch's.
_RULES: dict[OpOverload, Callable[..., Any]] = {
    **QUIRKS,
    **VOLUMES,
    **POOLS,
    **ORDERING,
    **RUNNING,
    **SCATTER_REDUCTIONS,
    **GRIDS,
    **INTEGERS,
    **RANDOM_NUMBERS,
    **ANTIALIASING,
    **NORMS,
}


def pre_partition_rules(selective: Container[OpOverload]) -> dict[OpOverload, Callable[..., Any]]:
    """Return rules to apply before partitioning, so that backends get the resulting operators.

    Args:
        selective: Operators for which every partitioner supports only some calls; a rule
            decomposes the other calls.
    """
    volumes = {_CONV3D: conv3d} if _CONV3D in selective else {}
    return {**expert_rules(), **volumes}


@dataclass(frozen=True, slots=True)
class Decompositions:
    """Decompositions by operator.

    Attributes:
        rules: For operators that appear in torch's traces.
        composites: For operators that torch decomposes while tracing (CompositeImplicitAutograd).
        required: Rules that apply even if there is a kernel.
    """

    rules: Mapping[OperatorBase, Callable[..., Any]]
    composites: Mapping[OperatorBase, Callable[..., Any]]
    required: Mapping[Any, Callable[..., Any]]


def decompositions(settings: EmitConfig, *, complex_numbers: bool = False) -> Decompositions:
    """Return torch's decompositions, overridden by ours where the runtime's kernels require it.

    Args:
        settings: The settings: their decompositions take precedence, and quantized operators with
            a custom kernel stay.
        complex_numbers: Whether to include rules for complex numbers, which slow tracing down.
    """
    rules: dict[Any, Callable[..., Any]] = dict(core_decompositions())
    rules |= {target: reference_decomposition(target) for target in _REFERENCES}
    quantized = {
        target: rule
        for target, rule in quantization_rules().items()
        if find_kernel(target, settings.table)[0] is None
    }
    special = {**_RULES, **quantized, **expert_rules()}
    for table in (BATCH_NORMS, SUMS, HALF_SUMS, COMPLEX_NUMBERS if complex_numbers else {}):
        for target, rule in table.items():
            other = special.get(target, rules.get(target))
            special[target] = rule if other is None else _first_of(rule, other)
    composites: dict[Any, Callable[..., Any]] = {}
    for target in _KEPT:
        rules.pop(target, None)
        if composite_parts(target):
            composites[target] = keep_whole
    for target, rule in {**special, _ATTENTION: attention}.items():
        (composites if composite_parts(target) else rules)[target] = keeping_layouts(rule)
    extra = settings.decompositions
    for target, rule in extra.items():
        (composites if composite_parts(target) else rules)[target] = rule
    return Decompositions(rules, composites, {**special, **extra})


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
    ranges = RANGES.set(exported.range_constraints)
    try:
        return _decomposed(exported, settings)
    finally:
        RANGES.reset(ranges)


def _decomposed(exported: ExportedProgram, settings: EmitConfig) -> ExportedProgram:
    table = decompositions(settings, complex_numbers=has_complex_numbers(exported))
    if not needs_decomposition(exported, table, settings.table):
        return exported
    varying = _varying_sizes(exported)
    try:
        parts = decompose_graph(exported, Rules(table.rules, table.composites, by_result=True))
        _check_sizes(varying)
    except EmitterError:
        raise
    except DecomposeError as error:
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


def needs_decomposition(
    exported: ExportedProgram, table: Decompositions, kernels: KernelTable
) -> bool:
    """Return whether any operator of ``exported`` needs a decomposition."""
    return any(_must_decompose(node, table, kernels) for node in Provenance(exported).nodes)


def _must_decompose(node: fx.Node, table: Decompositions, kernels: KernelTable) -> bool:
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return target.__name__ in _INLINED
    if not isinstance(target, OpOverload) or is_assertion(target):
        return False
    if schema_of(target).is_mutable:
        return True
    rule = table.required.get(target)
    if rule is not None and not declines(rule, node):
        return True
    return find_kernel(target, kernels)[0] is None


def has_complex_numbers(exported: ExportedProgram) -> bool:
    """Return whether any node of ``exported`` may return a complex tensor."""
    return any(
        isinstance(value, torch.Tensor) and (value.is_complex() or "fft" in str(node.target))
        for node in (*exported.graph.nodes, *Provenance(exported).nodes)
        for value in pytree.tree_leaves(node.meta.get("val"))
    )


@cache
def _first_of(rule: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule that tries two rules in turn."""

    def tried(*args: Any, **kwargs: Any) -> Any:
        result = rule(*args, **kwargs)
        return other(*args, **kwargs) if result is NotImplemented else result

    return tried
