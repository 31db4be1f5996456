"""Checks of what a rule returns against what its call returned in the original program.

torch does not check: other sizes and dtypes reach the readers of the call, and a missing result
fails where it is used, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
_UNTRUE_DTYPES = frozenset({"quantized_decomposed::choose_qparams_per_token"})
"""Operators that, to torch's fake tensors, have other dtypes than they give when they are run."""


def check_given(source: Node, call: Call, made: Template, rule: Callable[..., Any]) -> None:
    """Refuse a rule that returns other shapes, dtypes or devices than the call did.

    torch's own rules depend on settings that may have changed since, such as the default dtype.

    Args:
        source: The call in the original program.
        call: The same, as it is now.
        made: What the rule made of it.
        rule: The rule.

    Raises:
        DecomposeError: There are more results or fewer, or one has another shape, dtype or device.
    """
    target: Any = source.target
    if rule is stay or core_decompositions().get(target) is rule:
        return
    if not gives_the_same(source, call, made):
        found = _told(_results(call, made))
        raise DecomposeError(
            f"{describe_node(source)}: {describe_rule(rule)} gives {found}, expected "
            f"{_told(source.meta['val'])}, as the operator gives: mend the rule, or leave it out"
        )


class Counted(Mapping[Any, Callable[..., Any]]):
    """Rules that give no fewer results than their operators, or raise ``DecomposeError``.

    For wherever torch calls them. Below its functionalization it takes as many results off its
    stack as the schema has, without looking: what lies before them in memory is read as tensors,
    and the process dies now and then.

    Args:
        rules: By operator; they are wrapped as they are asked for.
    """

    def __init__(self, rules: Mapping[Any, Callable[..., Any]]) -> None:
        self._rules = rules

    def __getitem__(self, operator: Any) -> Callable[..., Any]:
        """Return the rule of an operator.

        Args:
            operator: Any operator.

        Raises:
            KeyError: There is none.
        """
        rule = self._rules[operator]
        if not isinstance(operator, OpOverload) or core_decompositions().get(operator) is rule:
            return rule
        count = len(schema_of(operator).returns)
        return rule if count < 2 else partial(_given, operator, rule, count)

    def __iter__(self) -> Iterator[Any]:
        """Return the operators."""
        return iter(self._rules)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._rules)


def _given(
    operator: OpOverload, rule: Callable[..., Any], count: int, *args: Any, **kwargs: Any
) -> Any:
    made = rule(*args, **kwargs)
    if made is NotImplemented or (isinstance(made, (tuple, list)) and len(made) == count):
        return made
    raise DecomposeError(
        f"{operator}: {describe_rule(rule)} gives {_told(made)}, expected {count} results, as the "
        "operator gives: mend the rule, or leave it out"
    )


def gives_the_same(source: Node, call: Call, made: Template) -> bool:
    """Return whether a call gives what it gave: number, shapes, dtypes and devices of results.

    Strides may be others. Sizes are compared where both are numbers.

    Args:
        source: The call in the original program.
        call: The same, as it is now.
        made: What it becomes.
    """
    if "val" not in source.meta:
        return True
    target = source.target
    untrue = isinstance(target, OpOverload) and schema_of(target).name in _UNTRUE_DTYPES
    expected = pytree.tree_leaves(source.meta["val"])
    found = pytree.tree_leaves(_results(call, made))
    return len(found) == len(expected) and all(
        _agree(*pair, dtypes=not untrue) for pair in zip(expected, found, strict=True)
    )


def describe_rule(rule: Callable[..., Any]) -> str:
    """Return what a rule is called in errors.

    Args:
        rule: Any function.
    """
    return f"the rule {rule.__module__}.{getattr(rule, '__qualname__', repr(rule))}"


def _results(call: Call, made: Template) -> Any:
    """Return a tree with the facts of each result."""
    known: dict[Node, Any] = dict(zip(made.inputs, call.facts, strict=True))
    for step in made.steps:
        known[step.node] = step.facts if isinstance(step, Step) else step.held
    return pytree.tree_map(
        lambda leaf: known[leaf.node] if isinstance(leaf, Result) else leaf, made.results
    )


def _agree(expected: Any, found: Any, *, dtypes: bool) -> bool:
    if not isinstance(expected, torch.Tensor) or not isinstance(found, _TENSORS):
        return isinstance(expected, torch.Tensor) is isinstance(found, _TENSORS)
    # Symbols are not compared, which would add a guard.
    sizes = [
        pair
        for pair in zip(expected.shape, found.shape, strict=False)
        if all(isinstance(size, int) for size in pair)
    ]
    return (
        (found.dtype == expected.dtype or not dtypes)
        and found.device == expected.device
        and len(found.shape) == expected.dim()
        and all(one == other for one, other in sizes)
    )


def _told(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_told, value))})"
    if isinstance(value, _TENSORS):
        return f"{value.dtype} {[*value.shape]} on {value.device}"
    return repr(value)
