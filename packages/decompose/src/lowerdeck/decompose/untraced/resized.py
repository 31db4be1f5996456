"""Templates of calls that differ from a traced one in sizes alone, without tracing them.

The layers of a network of convolutions differ in channels and images, and each would be a distinct
call: 131 of 133 in a DenseNet. What convolutions and norms become depends on how many dimensions
there are, not on how long they are. How the result lies in memory the program says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from lowerdeck.decompose._torch_private import traced_meta
from lowerdeck.decompose.calls.facts import TensorFacts
from lowerdeck.decompose.calls.keys import Call
from lowerdeck.decompose.calls.template import Result, Step, Template
from lowerdeck.decompose.rules import Rules
from lowerdeck.decompose.untraced.identities import Before, lies_as_before
from lowerdeck.torch_base import FakeTensor

_ATEN = torch.ops.aten

_PARTS: Mapping[Any, Any] = MappingProxyType(
    {
        _ATEN.conv1d.default: _ATEN.convolution.default,
        _ATEN.conv2d.default: _ATEN.convolution.default,
        _ATEN.conv3d.default: _ATEN.convolution.default,
        _ATEN.batch_norm.default: _ATEN._native_batch_norm_legit_no_training.default,
    }
)
"""What becomes one call of what, whatever the sizes are."""


class Resized:
    """What was traced of such calls in one program.

    Args:
        rules: How operators are decomposed.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._known: dict[Any, Template] = {}

    def find(self, call: Call, before: Before | None) -> Template | None:
        """Return what a call becomes that is like a known one but for sizes, or None.

        Args:
            call: The call.
            before: The same in the original program; None where that tells nothing.
        """
        found = self._known.get(self._likeness(call, before))
        if found is None or before is None:
            return None
        return _with_result(found, before)

    def learn(self, call: Call, before: Before | None, traced: Template) -> None:
        """Know a template for calls of other sizes, if it is one for them.

        Args:
            call: The call.
            before: The same in the original program.
            traced: What it becomes.
        """
        likeness = self._likeness(call, before)
        if likeness is None or before is None or not _is_one_call(call, traced):
            return
        # Told as the others will be, it must come out as it was traced.
        told = _with_result(traced, before)
        if [_facts(step) for step in told.steps] == [_facts(step) for step in traced.steps]:
            self._known[likeness] = traced

    def _likeness(self, call: Call, before: Before | None) -> Any:
        """Return what such calls have in common; None for other calls."""
        target, *arguments, _, differentiable, _ = call.key
        # Of the state: no region's, for ``before`` is known, and no rule looks at the result.
        if before is None or call.stays or target not in _PARTS:
            return None
        if target in self._rules.composites or not self._leaves(_PARTS[target]):
            return None
        if type(before.node.meta.get("val")) is not FakeTensor or not lies_as_before(call, before):
            return None
        known = []
        for facts in call.facts:
            # A dimension of no elements is a case of its own for some kernels.
            if not isinstance(facts, TensorFacts) or not facts.is_static or 0 in facts.shape:
                return None
            # Ranks, not sizes: that is all that these decompositions look at.
            rest = (len(facts.shape), facts.dtype, facts.device, facts.requires_grad)
            known.append(rest)
        return (target, *arguments, tuple(known), differentiable)

    def _leaves(self, part: Any) -> bool:
        """Return whether what a rule makes of calls of ``part`` does not depend on sizes."""
        rule = self._rules.others.get(part)
        return rule is None or getattr(rule, "any_size", False)


def _is_one_call(call: Call, traced: Template) -> bool:
    """Return whether a template calls one operator and gives its first result."""
    if traced.written or traced.opaque or not isinstance(traced.results, Result):
        return False
    steps = traced.steps
    first, last = steps[0], steps[-1]
    if not isinstance(first, Step) or first.node.target is not _PARTS[call.key[0]]:
        return False
    if traced.results.node is not last.node or traced.results.views:
        return False
    if len(steps) == 1:
        return True
    rest = first.facts[1:] if isinstance(first.facts, tuple) else ()
    empty = bool(rest) and all(
        isinstance(each, TensorFacts) and each.shape == (0,) for each in rest
    )
    return empty and len(steps) == 2 and last.node.args == (first.node, 0)


def _with_result(traced: Template, before: Before) -> Template:
    """Return a template with the result that a call has in the original program."""
    held = before.node.meta["val"]
    target: Any = before.node.target
    value = held.detach() if held.requires_grad else held
    facts = TensorFacts.of(value)
    meta = traced_meta(target, value)

    def told(step: Any) -> Any:
        if not isinstance(step, Step):
            return step
        if not isinstance(step.facts, TensorFacts):
            # What a norm in evaluation gives besides has no elements.
            return replace(step, facts=type(step.facts)((facts, *step.facts[1:])))
        own = {key: meta[key] if key == "tensor_meta" else kept for key, kept in step.meta.items()}
        return replace(step, facts=facts, meta=own)

    return replace(traced, steps=tuple(map(told, traced.steps)))


def _facts(step: Any) -> Any:
    return (step.facts, step.meta) if isinstance(step, Step) else step
