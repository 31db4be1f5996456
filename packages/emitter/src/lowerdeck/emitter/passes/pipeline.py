"""The pass pipeline."""

from __future__ import annotations

from collections.abc import Callable

from lowerdeck.emitter.config import EmitConfig
from lowerdeck.emitter.ir.graph import Method
from lowerdeck.emitter.passes.compose_linears import compose_linears
from lowerdeck.emitter.passes.compute_numbers import compute_numbers
from lowerdeck.emitter.passes.drop_dead_code import drop_dead_code
from lowerdeck.emitter.passes.fold_constants import fold_constants
from lowerdeck.emitter.passes.group_products import group_products
from lowerdeck.emitter.passes.guard_empty import guard_empty
from lowerdeck.emitter.passes.legalize_layouts import legalize_layouts
from lowerdeck.emitter.passes.legalize_operands import legalize_operands
from lowerdeck.emitter.passes.remove_copies import remove_copies
from lowerdeck.emitter.passes.select_kernels import select_kernels
from lowerdeck.emitter.passes.share_views import share_views


def run_passes(
    method: Method, config: EmitConfig, stem_of: Callable[[str], str | None] | None = None
) -> None:
    """Run all passes on ``method``, so that it can be linearized.

    Args:
        method: The method, changed in place.
        stem_of: Returns the stem of the file of a parameter or buffer, None for the program
            itself.

    Raises:
        MissingKernelError: The runtime lacks a kernel.
    """
    # Assertions, for which there are no kernels, have no results.
    drop_dead_code(method)
    compute_numbers(method)
    compose_linears(method, config.table)
    fold_constants(method, stem_of)
    group_products(method)
    drop_dead_code(method)
    legalize_operands(method, config.table)
    legalize_layouts(method, config.table)
    remove_copies(method)
    share_views(method)
    drop_dead_code(method)
    select_kernels(method, config.table)
    guard_empty(method, config.table)
