"""Descriptions of operators: how to check them and emit XNNPACK nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import Enum, auto
from typing import Any, NamedTuple, TypeAlias

import torch

from lowerdeck.serializer import XnnEncoding
from lowerdeck.xnnpack.emit import Call, Emission, Tracked, is_fixed, named, symbols_refusal
from lowerdeck.xnnpack.operators.results import first_result, first_result_refusal, following_clamp

ASSERTION = torch.ops.aten._assert_tensor_metadata.default
"""Asserts the dtype and device that a tensor had at export."""
INNER_TENSOR = "export.access_subclass_inner_tensor.default"
"""Operator that reads an inner tensor of a tensor subclass, such as torchao's."""


class Scales(NamedTuple):
    """Quantised encodings of one call.

    Attributes:
        inputs: Encodings of its inputs except weights.
        result: Encoding of its result.
    """

    inputs: tuple[XnnEncoding, ...]
    result: XnnEncoding


class FloatNeededError(Exception):
    """The result needs float; raised by an emitter before it adds a node."""


class Integers(Enum):
    """How an operator handles 8-bit integers with constant scales."""

    NEVER = auto()
    """It computes floats only."""
    KEEPS = auto()
    """Its result has the encoding of its input."""
    JOINS = auto()
    """Its inputs have the encoding of its result."""
    CHOOSES = auto()
    """Its result may have any constant scale."""


Emit: TypeAlias = Callable[[Emission, Call], None]
"""Adds the nodes of a call and defines its result."""
Refusal: TypeAlias = Callable[[Call], str | None]
"""Returns why XNNPACK does not support a call, or None."""


class Operator(NamedTuple):
    """Describes how to lower an operator to XNNPACK nodes.

    Attributes:
        emit: Adds the nodes and defines the call's result.
        refusal: Returns why XNNPACK does not support a call, or None. Tensors are already checked:
            floats, not empty, at most six dimensions.
        computes: Whether the operator alone justifies a delegate, unlike data movement.
        integers: How it handles 8-bit integers.
        int8_refusal: Returns why a call cannot be computed on 8-bit integers, or None.
        scale_refusal: Returns why a call cannot be computed with these scales, or None.
        wide: Whether float16 calls are computed in float32, as in eager.
        clamps: Whether a following clamp is fused into the node.
        packs: Names of the weight arguments, which have their own scales.
        bools: Names of the arguments that may be bool tensors, read as 0 and 1.
    """

    emit: Emit
    refusal: Refusal = lambda _: None
    computes: bool = True
    integers: Integers = Integers.NEVER
    int8_refusal: Refusal = lambda _: None
    scale_refusal: Callable[[Call, Scales], str | None] = lambda _, __: None
    wide: bool = False
    clamps: bool = False
    packs: tuple[str, ...] = ()
    bools: tuple[str, ...] = ()


Build: TypeAlias = Callable[[Emission, Tracked, Call], Tracked]
"""Adds nodes for a call and returns its result."""


def first_of(*refusals: Refusal) -> Refusal:
    """Combine refusals; the first reason is returned."""
    return lambda call: next(filter(None, (refusal(call) for refusal in refusals)), None)


def constants(*names: str, subject: str = "weight or bias") -> Refusal:
    """Return a refusal of calls whose named arguments are not constant."""
    verb = "is" if " or " in subject or not subject.endswith("s") else "are"
    return lambda call: (
        None if all(map(call.is_constant, names)) else f"its {subject} {verb} not constant"
    )


def fixed(sizes: Callable[[Call], Iterable[object]], reason: str) -> Refusal:
    """Return a refusal of calls with symbolic sizes or numbers."""
    return lambda call: None if all(map(is_fixed, sizes(call))) else reason


def one_symbol(call: Call) -> str | None:
    """Refuse operands with sizes that a reshape cannot produce."""
    return symbols_refusal(call.shape())


def fixed_axis(call: Call) -> str | None:
    """Refuse calls along a dimension whose size is symbolic."""
    return (
        None
        if is_fixed(call.shape()[call.axis()])
        else "it takes elements along a dynamic dimension"
    )


def has_dimensions(call: Call) -> str | None:
    """Refuse 0-dim tensors."""
    return None if call.rank() else "it has no dimension"


def keeps_dtype(call: Call) -> str | None:
    """Refuse calls whose ``dtype`` is neither their input's nor float32."""
    dtype, own = call.args.get("dtype"), call.args[call.operand].meta["val"].dtype
    changes = call.args.get("half_to_float") or dtype not in (None, torch.float32, own)
    return "it changes the dtype" if changes else None


def function(build: Build, *refusals: Refusal, **options: Any) -> Operator:
    """Return an operator whose tensor operand is ``self`` or ``input``.

    Args:
        build: Adds the nodes. If the operator clamps, it must apply ``call.limits``.
        *refusals: As for :class:`Operator`.
        **options: Other fields of :class:`Operator`.
    """

    def emit(emission: Emission, call: Call) -> None:
        operand = emission.of(call.args[call.operand])
        last = first_result(call.node)
        if options.get("clamps"):
            last, limits = following_clamp(last)
            call = replace(call, limits=limits)
        emission.define(last, build(emission, operand, call))

    return Operator(emit, first_of(first_result_refusal, *refusals), **options)


def move(build: Build, *refusals: Refusal, **options: Any) -> Operator:
    """Return an operator that only moves elements, in any encoding."""
    return function(build, *refusals, **{**MOVES, **options})


MOVES: Mapping[str, Any] = {"computes": False, "integers": Integers.KEEPS}
"""The options of operators that only move elements."""
Table: TypeAlias = Mapping[object, Operator]
"""Maps operators of torch (``torch.ops.aten...``) to their emitters."""


def table(entries: Mapping[str, Operator]) -> Table:
    """Return a table of operators from names (see :func:`named`) grouped by operator."""
    return {op: entry for names, entry in entries.items() for op in named(names)}
