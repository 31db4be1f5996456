"""The table of decompositions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

import torch

from lowerdeck import decompose
from lowerdeck.emitter._torch_private import reference_decomposition
from lowerdeck.emitter.config import EmitConfig
from lowerdeck.emitter.decompositions.antialiasing import ANTIALIASING
from lowerdeck.emitter.decompositions.attention import attention
from lowerdeck.emitter.decompositions.experts import expert_rules
from lowerdeck.emitter.decompositions.grids import GRIDS
from lowerdeck.emitter.decompositions.integers import INTEGERS
from lowerdeck.emitter.decompositions.layouts import keeping_layouts
from lowerdeck.emitter.decompositions.norms import BATCH_NORMS, NORMS
from lowerdeck.emitter.decompositions.ordering import ORDERING
from lowerdeck.emitter.decompositions.pools import POOLS
from lowerdeck.emitter.decompositions.quantization import quantization_rules
from lowerdeck.emitter.decompositions.quirks import QUIRKS
from lowerdeck.emitter.decompositions.random_numbers import RANDOM_NUMBERS
from lowerdeck.emitter.decompositions.running import RUNNING
from lowerdeck.emitter.decompositions.scatter_reductions import SCATTER_REDUCTIONS
from lowerdeck.emitter.decompositions.sums import HALF_SUMS, SUMS
from lowerdeck.emitter.decompositions.volumes import VOLUMES
from lowerdeck.emitter.ir.kernel_lookup import find_kernel
from lowerdeck.torch_base import OpOverload, composite_parts, core_decompositions

Rule: TypeAlias = Callable[..., Any]
_ATEN = torch.ops.aten

# Composite operators that the runtime runs as one kernel, mostly faster than their parts.
_KEPT = (
    *(_ATEN.linear.default, _ATEN.glu.default, _ATEN.logit.default, _ATEN.pixel_shuffle.default),
    *(_ATEN.pixel_unshuffle.default, _ATEN.roll.default, _ATEN.stack.default, _ATEN.tril.default),
    *(_ATEN.var_mean.correction, _ATEN.floor_divide.default, _ATEN.masked_fill.Scalar),
    *(_ATEN.replication_pad1d.default, _ATEN.upsample_bilinear2d.vec),
    _ATEN.upsample_nearest2d.vec,
)
_ATTENTION = _ATEN.scaled_dot_product_attention.default

# Operators without a kernel that torch has a decomposition for, but does not apply by default.
_REFERENCES = (
    _ATEN.linalg_vector_norm.default,
    # Batch norm in training mode.
    _ATEN._native_batch_norm_legit_functional.default,
    _ATEN._batch_norm_with_update_functional.default,
    _ATEN.tril_indices.default,
    _ATEN.triu_indices.default,
)

# Our own rules, which take precedence over torch's.
_RULES: dict[OpOverload, Rule] = {
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


def own_rules(settings: EmitConfig, *, complex_numbers: bool = False) -> dict[Any, Rule]:
    """Return the rules that apply even if there is a kernel.

    Args:
        settings: The settings: their decompositions take precedence, and quantized operators with
            a custom kernel stay.
        complex_numbers: Whether to include rules for complex numbers, which slow tracing down.
    """
    quantized = {
        target: rule
        for target, rule in quantization_rules().items()
        if find_kernel(target, settings.table)[0] is None
    }
    rules: dict[Any, Rule] = {**_RULES, **quantized, **expert_rules()}
    tables = [BATCH_NORMS, SUMS, HALF_SUMS]
    if complex_numbers:
        from lowerdeck.emitter.decompositions.complex_numbers import COMPLEX_NUMBERS

        tables.append(COMPLEX_NUMBERS)
    for table in tables:
        for target, rule in table.items():
            other = rules.get(target, _torch_rules().get(target))
            rules[target] = rule if other is None else _first_of(rule, other)
    return {**rules, **settings.decompositions}


def all_rules(
    own: Mapping[Any, Rule], settings: EmitConfig
) -> tuple[dict[Any, Rule], dict[Any, Rule]]:
    """Return torch's rules, overridden by ours where the runtime's kernels require it.

    Args:
        own: The result of ``own_rules``.

    Returns:
        Rules for operators that appear in torch's traces, and for operators that torch decomposes
        while tracing (CompositeImplicitAutograd).
    """
    rules = {target: rule for target, rule in _torch_rules().items() if target not in _KEPT}
    composites: dict[Any, Rule] = {op: decompose.keep_whole for op in _KEPT if composite_parts(op)}
    for target, rule in {**own, _ATTENTION: attention, **settings.decompositions}.items():
        kept = rule if target in settings.decompositions else keeping_layouts(rule)
        (composites if composite_parts(target) else rules)[target] = kept
    return rules, composites


@cache
def _torch_rules() -> Mapping[Any, Rule]:
    references = {target: reference_decomposition(target) for target in _REFERENCES}
    return {**core_decompositions(), **references}


@cache
def _first_of(rule: Rule, other: Rule) -> Rule:
    """Return a rule that tries two rules in turn."""

    def tried(*args: Any, **kwargs: Any) -> Any:
        result = rule(*args, **kwargs)
        return other(*args, **kwargs) if result is NotImplemented else result

    return tried
