"""Checks of the results of rules against the recorded results of the calls that they decompose.

torch does not check: other sizes and dtypes reach the readers of the call, and a missing result
fails where it is used, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from lowerdeck.decompose.calls.facts import TensorFacts
from lowerdeck.decompose.calls.keys import Call
from lowerdeck.decompose.calls.template import Result, Step, Template
from lowerdeck.decompose.errors import DecomposeError
from lowerdeck.decompose.rules import stay
from lowerdeck.torch_base import OpOverload, core_decompositions, describe_node, pytree, schema_of

_TENSORS = (TensorFacts, torch.Tensor)
# The fake kernel of this operator gives other dtypes than its kernel (torch 2.13).
_FALSE_DTYPES = frozenset({"quantized_decomposed::choose_qparams_per_token"})


def check_results(source: Node, call: Call, template: Template, rule: Callable[..., Any]) -> None:
    """Check number, shapes, dtypes and devices of what a rule returns; strides may be others.

    Args:
        source: The call in the original program.
        call: The same call as a key.
        template: The call, decomposed by the rule.
        rule: The rule. torch's own are not checked: they depend on settings that may have changed.

    Raises:
        DecomposeError: The original call returned something else.
    """
    if rule is stay or core_decompositions().get(source.target) is rule:  # type: ignore[call-overload]
        return
    if not has_recorded_results(source, call, template):
        raise DecomposeError(
            f"{describe_node(source)}: {describe_rule(rule)} gives "
            f"{_described(_results(call, template))}, expected "
            f"{_described(source.meta['val'])}, as the operator gives: mend the rule, or leave it "
            "out"
        )


def has_recorded_results(source: Node, call: Call, template: Template) -> bool:
    """Return whether a template gives the number, shapes, dtypes and devices that were recorded.

    Args:
        source: The call in the original program.
        call: The same call as a key.
        template: The template of the call.
    """
    target = source.target
    dtypes = not isinstance(target, OpOverload) or schema_of(target).name not in _FALSE_DTYPES
    expected = pytree.tree_leaves(source.meta.get("val"))
    found = pytree.tree_leaves(_results(call, template))
    return "val" not in source.meta or (
        len(found) == len(expected)
        and all(_agree(*pair, dtypes=dtypes) for pair in zip(expected, found, strict=True))
    )


def _results(call: Call, template: Template) -> Any:
    """Return the results of a template, with facts for tensors."""
    facts: dict[Node, Any] = dict(zip(template.inputs, call.facts, strict=True))
    for step in template.steps:
        facts[step.node] = step.facts if isinstance(step, Step) else step.held
    return pytree.tree_map(
        lambda leaf: facts[leaf.node] if isinstance(leaf, Result) else leaf, template.results
    )


def with_checked_counts(rules: Mapping[Any, Callable[..., Any]]) -> dict[Any, Any]:
    """Return rules that raise ``DecomposeError`` where they give too few results.

    torch's functionalization takes as many results off its stack as the schema has, without
    looking: with fewer, the process dies now and then.

    Args:
        rules: By operator.
    """
    own = core_decompositions()
    checked = dict(rules)
    for operator, rule in rules.items():
        if own.get(operator) is not rule and rule is not stay and isinstance(operator, OpOverload):
            count = len(schema_of(operator).returns)
            if count > 1:
                checked[operator] = partial(_call_rule, operator, rule, count)
    return checked


def _call_rule(
    operator: OpOverload, rule: Callable[..., Any], count: int, *args: Any, **kwargs: Any
) -> Any:
    results = rule(*args, **kwargs)
    if results is NotImplemented or (isinstance(results, (tuple, list)) and len(results) == count):
        return results
    raise DecomposeError(
        f"{operator}: {describe_rule(rule)} gives {_described(results)}, expected {count} "
        "results, as the operator gives: mend the rule, or leave it out"
    )


def describe_rule(rule: Callable[..., Any]) -> str:
    """Return what a rule is called in errors.

    Args:
        rule: Any function.
    """
    return f"the rule {rule.__module__}.{getattr(rule, '__qualname__', repr(rule))}"


def _agree(expected: Any, found: Any, *, dtypes: bool) -> bool:
    if not isinstance(expected, torch.Tensor) or not isinstance(found, _TENSORS):
        return isinstance(expected, torch.Tensor) is isinstance(found, _TENSORS)
    if len(found.shape) != expected.dim() or found.device != expected.device:
        return False
    # Symbols are not compared, which would add a guard.
    return (found.dtype == expected.dtype or not dtypes) and all(
        one == other
        for one, other in zip(expected.shape, found.shape, strict=True)
        if isinstance(one, int) and isinstance(other, int)
    )


def _described(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, _TENSORS):
        return f"{value.dtype} {[*value.shape]} on {value.device}"
    return repr(value)
