"""Decomposition tables, split as torch's tracing requires."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch.export import default_decompositions
from torch.export.decomp_utils import CustomDecompTable
from torch.fx import Node

from lowerdeck.decompose._torch_private import (
    KEPT_COMPOSITES,
    has_composite_kernel,
    is_preservable,
    own_rule,
)
from lowerdeck.decompose.errors import DecomposeError
from lowerdeck.decompose.keeping import Keep, check_kept
from lowerdeck.torch_base import OperatorBase, OpOverload, core_decompositions

Table = Mapping[OperatorBase, Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Rules:
    """Decomposition rules by operator, in the two tables of torch's tracing.

    Attributes:
        others: Rules for non-composite operators.
        composites: Rules for composite operators, which keep a call by returning
            ``NotImplemented``, as ``keep_whole`` does.
        by_result: Whether rules read the recorded result from
            ``torch.fx.traceback.get_current_meta()["val"]``, which distinguishes calls by result.
        chosen: Predicate by operator that selects calls to keep.
    """

    others: Table
    composites: Table
    by_result: bool = False
    # Not in cache keys: selected calls are copied without a template.
    chosen: Mapping[Any, Callable[[Node], bool]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls, table: Table | None, keep: Keep = (), rules: Table = MappingProxyType({})
    ) -> Rules:
        """Return rules from ``table``, ``rules`` and ``keep``.

        Args:
            table: As for ``ExportedProgram.run_decompositions``: core ATen by default; composite
                operators that are not in the table are kept.
            keep: Operators that are not decomposed.
            rules: Rules in addition to the table, which take precedence.

        Raises:
            DecomposeError: ``keep`` is not a collection, or has an operator that cannot be kept.
        """
        if not isinstance(keep, Iterable):
            raise DecomposeError(f"found {keep!r} as keep; expected a collection of operators")
        predicates = dict(keep) if isinstance(keep, Mapping) else dict.fromkeys(keep)
        for operator, which in predicates.items():
            check_kept(operator, which)
        chosen = {operator: which for operator, which in predicates.items() if which is not None}
        kept = predicates.keys() - chosen.keys()
        others, composites = _default() if table is None else _split(table)
        for operator, rule in rules.items():
            if is_preservable(operator):
                composites = {**composites, operator: rule}
            else:
                others = {**others, operator: rule}
        if not kept:
            return cls(others, composites, chosen=chosen)
        return cls(
            {operator: rule for operator, rule in others.items() if operator not in kept},
            {**composites, **{op: keep_whole for op in kept if has_composite_kernel(op)}},
            chosen=chosen,
        )

    def as_table(self) -> dict[OperatorBase, Callable[..., Any]]:
        """Return the rules as a table for ``run_decompositions``."""
        composites = filter(is_preservable, default_decompositions().materialize())
        default_rules = {op: rule for op in composites for rule in own_rule(op).values()}
        own_rules = {op: rule for op, rule in self.composites.items() if rule is not keep_whole}
        table = {**default_rules, **own_rules, **self.others}
        kept = {op for op, rule in self.composites.items() if rule is keep_whole}
        return {op: rule for op, rule in table.items() if op not in kept}

    def keeps_call(self, call: Node) -> bool:
        """Return whether a predicate of ``keep`` selects this call.

        Args:
            call: Node of the original graph.
        """
        which = self.chosen.get(call.target) if self.chosen else None
        return which is not None and bool(which(call))

    def leaves(self, operator: object) -> bool:
        """Return whether a call of ``operator`` is known to decompose to itself.

        For composites the rules determine it, for others ``calls_no_others``.
        """
        return (
            isinstance(operator, OpOverload)
            and self.keeps(operator)
            and (operator in self.composites or calls_no_others(operator))
        )

    def keeps(self, operator: OpOverload) -> bool:
        """Return whether a trace records calls of ``operator`` unchanged."""
        if operator in self.others:
            return False
        rule = self.composites.get(operator)
        return rule is keep_whole or (rule is None and not has_composite_kernel(operator))


_ATEN = torch.ops.aten
# These call no others either, but lack both tags in torch 2.13.
_UNTAGGED = frozenset(
    {_ATEN.fill.Tensor, _ATEN.floor_divide.default, _ATEN.roll.default, _ATEN.t.default}
    | {_ATEN.transpose.int, _ATEN.new_zeros.default}
)


def calls_no_others(operator: OpOverload) -> bool:
    """Return whether no autograd or functionalization kernel of ``operator`` calls another one."""
    if torch.Tag.core in operator.tags or operator in _UNTAGGED:
        return True
    # A few have Python kernels.
    return torch.Tag.pointwise in operator.tags and not any(
        "Autograd" in str(key) for key in operator.py_kernels
    )


def keep_whole(*_: Any, **__: Any) -> Any:
    """Return ``NotImplemented``: the rule of ``Rules.composites`` that keeps an operator."""
    return NotImplemented


@cache
def _default() -> tuple[Table, Table]:
    # torch's table has rules for 500 composites that equal their default decomposition; overriding
    # all of them is slow.
    composites = {op: rule for op, rule in core_decompositions().items() if is_preservable(op)}
    others = {op: rule for op, rule in core_decompositions().items() if op not in composites}
    return others, {**dict.fromkeys(KEPT_COMPOSITES, keep_whole), **composites}


def _split(table: Table) -> tuple[Table, Table]:
    if isinstance(table, CustomDecompTable):
        table = table.copy().materialize()
    operators = (*default_decompositions().materialize(), *KEPT_COMPOSITES, *table)
    composites: dict[OperatorBase, Callable[..., Any]] = {}
    # torch keeps composites that are not in the table.
    for operator in filter(is_preservable, operators):
        if operator not in table:
            composites[operator] = keep_whole
        elif not _is_default_decomposition(table[operator]):
            composites[operator] = table[operator]
    others = {op: rule for op, rule in table.items() if not is_preservable(op)}
    return others, composites


def _is_default_decomposition(rule: Callable[..., Any]) -> bool:
    """Return whether a composite's rule is torch's default."""
    function = getattr(rule, "func", rule)
    return getattr(function, "__name__", "") == "_special_op_to_decompose_cia"
