"""Recordings of calls that need no trace, only a fake result.

Such calls are unchanged, or are convolutions and norms that become one call of another operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from operator import getitem
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from lowerdeck.decompose._torch_private import run_fake
from lowerdeck.decompose.calls.facts import TensorFacts, facts_of, is_static, tensor_meta_of
from lowerdeck.decompose.calls.keys import Call, fill
from lowerdeck.decompose.recording import Recording, as_dispatched
from lowerdeck.decompose.rules import Rules
from lowerdeck.torch_base import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    overload_name,
    returns_alias,
    schema_of,
)

_ATEN = torch.ops.aten

_SCATTERS = frozenset({_ATEN.slice_scatter.default, _ATEN.select_scatter.default})

# as_strided has an absolute storage offset; functionalization sometimes drops alias.
TRACED = frozenset({_ATEN.as_strided.default, _ATEN.alias.default})


def record_untraced(
    call: Call, rules: Rules, mode: FakeTensorMode, recorded: Any = None
) -> Recording | None:
    """Return the recording of ``call`` if it is known to be a single call, else None.

    Args:
        call: A call outside of contexts such as autocast.
        recorded: Fake result of the call, if known.
    """
    # Traces add default options to factory functions.
    if not call.inputs or not isinstance(call.key[0], OpOverload):
        return None
    operator, convert = _part(call, rules) or (_unchanged_operator(call, rules), None)
    if operator is None:
        return None
    graph = Graph()
    inputs = [graph.placeholder(f"given_{index}") for index in range(len(call.inputs))]
    for node, value in zip(inputs, call.fake_inputs(mode), strict=True):
        node.meta["val"] = value
    args, kwargs = fill(call.args, inputs), fill(call.kwargs, inputs)
    if convert is not None:
        args, kwargs = convert(*args, **kwargs), {}
    # C++ and Python composites record explicit defaults differently.
    if args is None or as_dispatched(operator, args, kwargs) != (args, kwargs):
        return None
    values: Any
    options: Any
    values, options = map_arg((args, kwargs), lambda node: node.meta["val"])
    rule = rules.others.get(operator)
    try:
        if rule is not None and run_fake(rule, values, options, mode) is not NotImplemented:
            return None
        # Inferring it is slow if sizes are dynamic.
        is_known = operator is call.key[0] and not call.is_static and type(recorded) is FakeTensor
        value = facts_of(recorded).fake(mode) if is_known else None
        if value is None:
            value = _elementwise_result(call, operator, args, kwargs, mode)
        value = run_fake(operator, values, options, mode) if value is None else value
    except Exception:
        # The trace may fail too, with a better message.
        return None
    node = graph.call_function(operator, args, kwargs)
    if isinstance(value, tuple):
        # Norms also return statistics.
        node.meta = {"val": value, "original_aten": operator}
        value, node = value[0], graph.call_function(getitem, (node, 0))
    if type(value) is not FakeTensor:
        return None
    node.meta = {"val": value, "original_aten": operator}
    node.meta["tensor_meta"] = tensor_meta_of(value, facts_of(value))
    if operator is functional_variant(call.key[0]):
        old_value = args[0].meta["val"]
        # Otherwise torch converts or broadcasts the new value.
        if (old_value.dtype, old_value.shape) != (value.dtype, value.shape):
            return None
        written = inputs.index(args[0])
        return Recording(graph, inputs, node, written={written: node}, returned={0: written})
    if returns_alias(operator):
        return Recording(graph, inputs, node, shared={0: [inputs.index(args[0])]})
    return Recording(graph, inputs, node, unaliased={0})


def _elementwise_result(
    call: Call, operator: OpOverload, args: Any, kwargs: Any, mode: FakeTensorMode
) -> Any:
    """Return the fake result of an elementwise call on one tensor, or of a scatter of a slice.

    The result has the sizes of the first operand if that is contiguous; inferring dynamic ones is
    slow. Returns None for other calls.
    """
    facts = call.facts[0]
    is_elementwise = len(call.facts) == 1 and torch.Tag.pointwise in operator.tags
    if call.is_static or not (is_elementwise or operator in _SCATTERS):
        return None
    if not isinstance(facts, TensorFacts) or facts.requires_grad or not facts.is_contiguous:
        return None
    if not is_elementwise:
        return facts.fake(mode)
    small = replace(facts, shape=(2,), stride=(1,)).fake(mode)
    values: Any
    options: Any
    values, options = map_arg((args, kwargs), lambda _: small)
    result = run_fake(operator, values, options, mode)
    return replace(facts, dtype=result.dtype).fake(mode)


def _unchanged_operator(call: Call, rules: Rules) -> OpOverload | None:
    """Return the operator of a call that decomposes to itself, else None.

    In-place operators become their functional variants, as in torch's functionalization.
    """
    target = call.key[0]
    operator = functional_variant(target) or target
    if target in TRACED or not rules.leaves(operator) or not returns_one_tensor(operator):
        return None
    requires_grad = call.differentiable or any(
        isinstance(facts, TensorFacts) and facts.requires_grad for facts in call.facts
    )
    # requires_grad of a parameter's view depends on the decomposition.
    is_traced = requires_grad and (returns_alias(operator) or operator is not target)
    return None if is_traced else operator


@cache
def functional_variant(operator: OpOverload) -> OpOverload | None:
    """Return the functional variant of an in-place operator, else None."""
    schema = schema_of(operator)
    if operator.namespace != "aten" or not schema.name.endswith("_"):
        return None
    packet = getattr(_ATEN, schema.name.removeprefix("aten::")[:-1], None)
    variant = getattr(packet, overload_name(operator), None)
    # Only the first argument may be mutated, as in ``add_``.
    writes = [argument.is_write for argument in schema.arguments]
    if not isinstance(variant, OpOverload) or writes != [True] + [False] * (len(writes) - 1):
        return None
    # `pow_.Scalar` takes (tensor, number), but `pow.Scalar` (number, tensor).
    # The first argument may have another name (``dropout``): it is positional.
    arguments, others = (
        [(argument.name if at else "", str(argument.type)) for at, argument in enumerate(part)]
        for part in (schema.arguments, schema_of(variant).arguments)
    )
    return variant if arguments == others and not returns_alias(variant) else None


@cache
def returns_one_tensor(operator: OpOverload) -> bool:
    """Return whether an operator is functional and its one result aliases at most argument 0."""
    schema = schema_of(operator)
    if schema.is_mutable or len(schema.returns) != 1:
        return False
    return not any(argument.alias_info is not None for argument in schema.arguments[1:])


def _part(call: Call, rules: Rules) -> Any:
    """Return the operator that a convolution or norm becomes, and its argument converter."""
    target = call.key[0]
    # Some kernels treat empty tensors differently; complex dtypes are decomposed further.
    is_supported = all(
        isinstance(facts, TensorFacts) and _is_nonempty_float(facts) for facts in call.facts
    )
    return _PARTS.get(target) if is_supported and target not in rules.composites else None


def _is_nonempty_float(facts: TensorFacts) -> bool:
    return is_static(facts) and 0 not in facts.shape and facts.dtype.is_floating_point


def convolution(
    rank: int,
    weight: Node,
    bias: Node | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Return the arguments of ``aten.convolution`` after the input, or None if it is unbatched.

    Args:
        rank: Rank of the input.
    """
    dims = weight.meta["val"].dim() - 2
    if rank != dims + 2:
        return None
    steps = [
        [item] * dims if isinstance(item, int) else item for item in (stride, padding, dilation)
    ]
    return (weight, bias, *steps, False, [0] * dims, groups)


def norm(image: Node, *arguments: Any) -> Any:
    """Return the arguments of a norm by running statistics; None for one by batch statistics."""
    *state, training, momentum, eps, _ = arguments
    return None if training or None in state[2:] else (image, *state, momentum, eps)


CONVOLUTION = _ATEN.convolution.default
NORM = _ATEN._native_batch_norm_legit_no_training.default


def _convolution(image: Node, *args: Any, **kwargs: Any) -> Any:
    others = convolution(image.meta["val"].dim(), *args, **kwargs)
    return None if others is None else (image, *others)


_PARTS: Mapping[Any, Any] = MappingProxyType(
    {
        _ATEN.conv1d.default: (CONVOLUTION, _convolution),
        _ATEN.conv2d.default: (CONVOLUTION, _convolution),
        _ATEN.conv3d.default: (CONVOLUTION, _convolution),
        _ATEN.batch_norm.default: (NORM, norm),
    }
)
"""Operators that decompose to one call of another operator, with argument converters."""
