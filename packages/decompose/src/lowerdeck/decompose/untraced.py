"""Templates of calls that need no trace: only their fake result is computed.

Tracing one call takes 2 ms, computing its result 0.1 ms. Most distinct calls of a model stay as
they are (57 of 76 in a llama), and the convolutions of a network differ in sizes alone (131
of 133 distinct calls in a DenseNet).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from lowerdeck.decompose._torch_private import FakeTensors, run_fake, traced_meta
from lowerdeck.decompose.calls.facts import TensorFacts, facts_of, is_static
from lowerdeck.decompose.calls.keys import Call, fill
from lowerdeck.decompose.calls.template import Result, Template
from lowerdeck.decompose.recording import Recording, as_dispatched
from lowerdeck.decompose.rules import Rules
from lowerdeck.torch_base import FakeTensor, OpOverload, overload_name, returns_alias, schema_of

_ATEN = torch.ops.aten

# The first has an absolute offset in the storage; functionalization sometimes drops the second.
TRACED = frozenset({_ATEN.as_strided.default, _ATEN.alias.default})


def record_unchanged(call: Call, rules: Rules, fakes: FakeTensors) -> Recording | None:
    """Return the trace of ``call`` if it is known to be one call of its operator; else None.

    An in-place operator becomes its functional variant, as in torch's functionalization.

    Args:
        call: A call outside of autocast and other contexts.
        rules: Rules by operator.
        fakes: Creates fake inputs.
    """
    target: Any = call.key[0]
    # Factory functions get default options from torch in a trace.
    if not call.inputs or not isinstance(target, OpOverload) or target in TRACED:
        return None
    operator = functional_variant(target) or target
    if not rules.leaves(operator) or not returns_one_tensor(operator):
        return None
    is_view = returns_alias(operator)
    requires_grad = call.differentiable or any(
        isinstance(facts, TensorFacts) and facts.requires_grad for facts in call.facts
    )
    # Whether a view of a parameter requires gradients depends on its decomposition.
    if requires_grad and (is_view or operator is not target):
        return None
    graph = Graph()
    values = call.fake_inputs(fakes)
    inputs = [graph.placeholder(f"given_{index}") for index in range(len(values))]
    for node, value in zip(inputs, values, strict=True):
        node.meta["val"] = value
    arguments = fill(call.args, inputs), fill(call.kwargs, inputs)
    args, kwargs = as_dispatched(operator, *arguments)
    if (args, kwargs) != arguments:
        # Whether defaults are recorded depends on the language of the composite.
        return None
    try:
        result = run_fake(operator, fill(call.args, values), fill(call.kwargs, values), fakes.mode)
    except Exception:
        # The trace fails as well, and describes the error.
        return None
    if type(result) is not FakeTensor:
        return None
    node = graph.call_function(operator, args, kwargs)
    node.meta = traced_meta(operator, result)
    if operator is not target:
        written = inputs.index(args[0])
        old_value = values[written]
        # Else torch converts or broadcasts the new value.
        if (old_value.dtype, old_value.shape) != (result.dtype, result.shape):
            return None
        return Recording(
            graph, inputs, node, {written: node}, {0: written}, {}, set(), set(), False, False
        )  # fmt: skip
    shared = {0: [inputs.index(args[0])]} if is_view else {}
    alone = set() if is_view else {0}
    return Recording(graph, inputs, node, {}, {}, shared, alone, set(), False, False)


@cache
def functional_variant(operator: OpOverload) -> OpOverload | None:
    """Return the functional variant of an in-place operator; None for others."""
    schema = schema_of(operator)
    if operator.namespace != "aten" or not schema.name.endswith("_"):
        return None
    packet = getattr(_ATEN, schema.name.removeprefix("aten::")[:-1], None)
    variant = getattr(packet, overload_name(operator), None)
    # Only the first argument may be written, as in ``add_``; a new one needs no entry anywhere.
    writes = [argument.is_write for argument in schema.arguments]
    if not isinstance(variant, OpOverload) or writes != [True] + [False] * (len(writes) - 1):
        return None
    names = [argument.name for argument in schema.arguments]
    is_same = names == [argument.name for argument in schema_of(variant).arguments]
    return variant if is_same and not returns_alias(variant) else None


@cache
def returns_one_tensor(operator: OpOverload) -> bool:
    """Return whether an operator is functional with one result, a view of its first at most."""
    schema = schema_of(operator)
    if schema.is_mutable or len(schema.returns) != 1:
        return False
    return not any(argument.alias_info is not None for argument in schema.arguments[1:])


_PARTS: Mapping[Any, Any] = MappingProxyType(
    {
        _ATEN.conv1d.default: _ATEN.convolution.default,
        _ATEN.conv2d.default: _ATEN.convolution.default,
        _ATEN.conv3d.default: _ATEN.convolution.default,
        _ATEN.batch_norm.default: _ATEN._native_batch_norm_legit_no_training.default,
    }
)
"""Operators that are decomposed into one call of another, whatever their sizes."""


class Resized:
    """Templates of convolutions and norms, for calls that differ from a traced one in sizes.

    Args:
        rules: Rules by operator.
        fakes: Creates fake inputs.
    """

    def __init__(self, rules: Rules, fakes: FakeTensors) -> None:
        self._rules = rules
        self._fakes = fakes
        self._templates: dict[Any, Template] = {}

    def find(self, call: Call) -> Template | None:
        """Return the template of a call outside of contexts, with results of its sizes."""
        traced = self._templates.get(self._key(call))
        if traced is None:
            return None
        inputs = call.fake_inputs(self._fakes)
        values: dict[Node, Any] = dict(zip(traced.inputs, inputs, strict=True))
        steps = []
        for step in traced.steps:
            args: Sequence[Any] = map_arg(step.node.args, values.__getitem__)
            value = run_fake(step.node.target, args, {}, self._fakes.mode)
            values[step.node] = value
            meta = {name: step.meta[name] for name in step.meta.keys() - {"tensor_meta"}}
            if "tensor_meta" in step.meta:
                meta["tensor_meta"] = traced_meta(call.key[0], value)["tensor_meta"]
            steps.append(replace(step, facts=facts_of(value), meta=meta))
        return replace(traced, steps=tuple(steps))

    def learn(self, call: Call, traced: Template) -> None:
        """Keep a template for calls of other sizes, if it is one call without keywords."""
        key = self._key(call)
        steps = traced.steps
        results = traced.results
        if key is None or not isinstance(results, Result) or results.views or results.fresh:
            return
        first = steps[0]
        is_part = first.node.target is _PARTS[call.key[0]]
        is_call = len(steps) == 1 or (len(steps) == 2 and steps[1].node.args == (first.node, 0))
        if is_part and is_call and results.node is steps[-1].node:
            self._templates[key] = traced

    def _key(self, call: Call) -> Any:
        """Return a key without sizes; None for calls of other operators."""
        target, *arguments, _, differentiable, _ = call.key
        if target not in _PARTS or target in self._rules.composites:
            return None
        rule = self._rules.others.get(_PARTS[target])
        if rule is not None and not getattr(rule, "any_size", False):
            return None
        facts_of_inputs = []
        for facts in call.facts:
            # Some kernels treat empty tensors differently.
            if not isinstance(facts, TensorFacts) or not is_static(facts) or 0 in facts.shape:
                return None
            facts_of_inputs.append(
                (len(facts.shape), facts.dtype, facts.device, facts.requires_grad)
            )
        return (target, *arguments, tuple(facts_of_inputs), differentiable)
