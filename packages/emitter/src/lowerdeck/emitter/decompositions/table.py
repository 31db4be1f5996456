"""The table of decompositions, and whether a program needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.export import ExportedProgram, default_decompositions

from lowerdeck.emitter._torch_private import reference_decompositions
from lowerdeck.emitter.config import EmitConfig
from lowerdeck.emitter.decompositions.attention import attention
from lowerdeck.emitter.decompositions.quirks import QUIRKS
from lowerdeck.emitter.kernels import KernelTable
from lowerdeck.emitter.passes.select_kernels import find_kernel
from lowerdeck.emitter.provenance import Provenance

Table: TypeAlias = dict[torch._ops.OperatorBase, Callable[..., Any]]

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
    _ATEN.unbind.int,
    _ATEN.var_mean.correction,
    _ATEN.floor_divide.default,
    _ATEN.masked_fill.Scalar,
    _ATEN.replication_pad1d.default,
)

# Operators without a kernel that torch leaves whole, but knows how to take apart.
_REFERENCES = (_ATEN.linalg_vector_norm.default,)


def decomposition_table(
    extra: Mapping[torch._ops.OpOverload, Callable[..., Any]],
) -> Table:
    """Return the table for ``run_decompositions``.

    Args:
        extra: Entries of the user, which override all others.
    """
    table: Table = dict(default_decompositions())
    for target in _KEPT:
        table.pop(target, None)
    table.update(reference_decompositions(_REFERENCES))
    for target, rule in QUIRKS.items():
        table[target] = rule
    table[_ATEN.scaled_dot_product_attention.default] = attention
    for target, rule in extra.items():
        table[target] = rule
    return table


def decompose(exported: ExportedProgram, settings: EmitConfig) -> ExportedProgram:
    """Return a program of operators that the emitter maps to kernels; the given one is unchanged.

    A program that has only such operators comes back as it is: retracing costs most of the time.

    Args:
        exported: Any exported program: training IR, core ATen, with delegates or without.
        settings: The settings of the emission.
    """
    table = decomposition_table(settings.decompositions)
    if not needs_decomposition(exported, table, settings.table):
        return exported
    decomposed: ExportedProgram = exported.run_decompositions(table)
    return decomposed


def needs_decomposition(exported: ExportedProgram, table: Table, kernels: KernelTable) -> bool:
    """Return whether any operator of ``exported`` cannot be emitted as it stands.

    Args:
        exported: The program.
        table: How operators are taken apart.
        kernels: The kernels that may be called.
    """
    return any(_must_go(node, table, kernels) for node in Provenance(exported).nodes)


def _must_go(node: fx.Node, table: Table, kernels: KernelTable) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target._schema.is_mutable or find_kernel(target, kernels)[0] is None:
        return True
    return target in table
