"""Effects of operators besides their value, by their schemas and tables of exceptions."""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass, replace
from enum import Flag, auto
from functools import cache
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from lowerdeck.torch_base._torch_private import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    composite_parts,
    schema_of,
)


class Effect(Flag):
    """What a node does besides computing its value."""

    NONE = 0
    WRITES = auto()
    """Changes a value that it reads."""
    RANDOM = auto()
    """Draws from the shared random generator."""
    EFFECT = auto()
    """Changes something outside the graph."""
    CHECK = auto()
    """Only raises or passes, so that its order among other checks does not matter."""
    MODE = auto()
    """Changes how every later node computes (gradient mode, autocast)."""


Arguments: TypeAlias = tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What the callee of a node does.

    Attributes:
        writes: Positions and names of the arguments that it writes; empty with WRITES means all.
        aliases: Whether its result may share memory with what it reads.
        aliased: Positions and names of the arguments that it may share memory with; empty with
            ``aliases`` means all.
        only_looks: Whether it reads none of the bytes: a view, or a question about the shape.
        inplace_at: Position of its parameter ``inplace``; -1 without one.
        spared_by: The argument that, where it is False, keeps it from writing; none for a write
            that always happens.
    """

    effect: Effect = Effect.NONE
    writes: Arguments = ()
    aliases: bool = False
    aliased: Arguments = ()
    only_looks: bool = False
    inplace_at: int = -1
    spared_by: Arguments = ()


PURE = Behaviour()
UNKNOWN = Behaviour(aliases=True)
FIRST: Arguments = ((0, "input"),)
_INPLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        *("iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul"),
        *("ior", "ipow", "irshift", "isub", "itruediv", "ixor"),
    )
)
_CHECKS = frozenset(
    {
        "_assert",
        "_assert_async",
        "_assert_scalar",
        "_assert_tensor_metadata",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
    }
)
_QUESTIONS = frozenset(
    {"_assert_tensor_metadata", "sym_numel", "sym_size", "sym_storage_offset", "sym_stride"}
)
_MODES = frozenset({"_set_grad_enabled", "_enter_autocast", "_exit_autocast"})
# Operators whose results may alias arguments although their schemas do not say so, as torch's
# operator samples show (tests/test_aliases.py).
_SILENT_ALIASES = frozenset(
    {
        *("_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"),
        *("alpha_dropout", "dropout", "feature_alpha_dropout", "feature_dropout"),
        *("atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "meshgrid"),
        *("cartesian_prod", "conj_physical", "einsum", "histogramdd", "sum_to_size", "type_as"),
    }
)
# Operators that write their statistics although their schemas do not say so, unless this argument
# is False (torch's functionalization has such a list as well).
_STATISTICS = frozenset({"running_mean", "running_var"})
_SILENT_WRITES = {
    "batch_norm": "training",
    "cudnn_batch_norm": "training",
    "instance_norm": "use_input_stats",
    "miopen_batch_norm": "training",
    "native_batch_norm": "training",
    "_batch_norm_impl_index": "training",
}
# torch's control flow refuses results that alias arguments, and a delegate returns new tensors.
_FRESH = frozenset(
    {
        *("associative_scan", "cond", "map_impl", "scan", "while_loop"),
        *("auto_functionalized", "auto_functionalized_v2", "executorch_call_delegate"),
    }
)


def hides_effects(target: object) -> bool:
    """Return whether an operator may alias or write an argument though its schema keeps silent.

    torch's functionalization trusts schemas: if such an operator is kept whole, writes are lost.

    Args:
        target: What a node calls.
    """
    return isinstance(target, OpOverload) and (
        _name(target) in _SILENT_ALIASES or _name(target) in _SILENT_WRITES
    )


def _name(operator: OpOverload) -> str:
    return schema_of(operator).name.rpartition("::")[2]


def returns_view(target: object) -> bool:
    """Return whether an operator may return a view of an argument that it does not write.

    Args:
        target: What a node calls.

    Example:
        >>> import torch
        >>> from lowerdeck.torch_base import returns_view
        >>> returns_view(torch.ops.aten.view.default), returns_view(torch.ops.aten.add_.Tensor)
        (True, False)
    """
    return returns_alias(target) and not written_arguments(target)


@cache
def returns_alias(target: object) -> bool:
    """Return whether an operator's schema says that a result may share an argument's memory.

    Args:
        target: What a node calls.
    """
    return isinstance(target, OpOverload) and any(
        result.alias_info is not None for result in schema_of(target).returns
    )


@cache
def written_arguments(target: object) -> tuple[str, ...]:
    """Return the names of the arguments that an operator writes, as its schema says, in order.

    Args:
        target: What a node calls.

    Example:
        >>> import torch
        >>> from lowerdeck.torch_base import written_arguments
        >>> written_arguments(torch.ops.aten.add_.Tensor)
        ('self',)
    """
    if not isinstance(target, OpOverload):
        return ()
    return tuple(
        argument.name
        for argument in schema_of(target).arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def returns_written(target: Any) -> bool:
    """Return whether an operator writes its first argument and returns it, and nothing else.

    Args:
        target: What a node calls.
    """
    if not returns_alias(target):
        return False
    schema = schema_of(target)
    return len(schema.returns) == 1 and schema.arguments[0].name in written_arguments(target)


def function_behaviour(node: Node) -> Behaviour:
    """Return what the function that ``node`` calls does, whatever its arguments."""
    target = node.target
    name = getattr(target, "__name__", "")
    if isinstance(target, OpOverload):
        behaviour = _overload(target)
        name = _name(target)
    elif target in _INPLACE_OPERATORS:
        behaviour = Behaviour(Effect.WRITES, ((0, "a"),), aliases=True)
    elif target is operator.setitem:
        return Behaviour(Effect.WRITES, ((0, "a"),))
    elif target is operator.getitem:
        return UNKNOWN
    elif getattr(target, "__module__", "") in {"_operator", "math", "builtins"}:
        return PURE
    elif isinstance(target, OpOverloadPacket):
        behaviour = _packet(target)
    elif isinstance(target, HigherOrderOperator):
        behaviour = PURE if name in _FRESH else UNKNOWN
    else:
        behaviour = _by_name(target)
    if name in _CHECKS:
        return Behaviour(Effect.CHECK, only_looks=name in _QUESTIONS)
    if isinstance(target, FunctionType) and "inplace" in inspect.signature(target).parameters:
        index = list(inspect.signature(target).parameters).index("inplace")
        return replace(behaviour, inplace_at=index)
    if name in _MODES:
        return Behaviour(Effect.MODE)
    # Last, since torch has a registry of operators with effects.
    if not behaviour.effect and node.is_impure():
        return replace(behaviour, effect=Effect.EFFECT)
    return behaviour


@cache
def _overload(target: OpOverload) -> Behaviour:
    schema = schema_of(target)
    arguments = [
        (-1 if argument.kwarg_only else index, argument.name, argument.alias_info)
        for index, argument in enumerate(schema.arguments)
    ]
    written = written_arguments(target)
    writes = tuple((index, name) for index, name, _ in arguments if name in written)
    spared: Arguments = ()
    silent = _SILENT_WRITES.get(_name(target))
    if silent is not None and not writes:
        writes = tuple((index, name) for index, name, _ in arguments if name in _STATISTICS)
        spared = tuple((index, name) for index, name, _ in arguments if name == silent)
    effect = Effect.WRITES if writes else Effect.NONE
    if torch.Tag.nondeterministic_seeded in target.tags:
        effect |= Effect.RANDOM
    if _name(target) in _SILENT_ALIASES:
        return Behaviour(effect, writes, aliases=True)
    aliases = returns_alias(target)
    aliased = tuple((index, name) for index, name, alias in arguments if alias) if aliases else ()
    # A composite operator, such as reshape, may copy.
    is_view = aliases and not writes and composite_parts(target) is None
    only_looks = is_view or _name(target) in _QUESTIONS
    return Behaviour(effect, writes, aliases, aliased, only_looks, spared_by=spared)


def _packet(packet: OpOverloadPacket) -> Behaviour:
    effect, aliases, writes = Effect.NONE, False, False
    in_place = packet.__name__.endswith("_") and not packet.__name__.endswith("__")
    for name in packet.overloads():  # type: ignore[no-untyped-call]
        behaviour = _overload(getattr(packet, name))
        effect |= behaviour.effect & ~Effect.WRITES
        # Overloads with ``out`` write only where it is given, which the node's kwargs show.
        writes |= in_place and bool(behaviour.effect & Effect.WRITES)
        aliases |= behaviour.aliases and not (behaviour.writes and not in_place)
    if writes:
        return Behaviour(effect | Effect.WRITES, ((0, "self"),), aliases=True)
    return Behaviour(effect, (), aliases)


def _by_name(target: object) -> Behaviour:
    name = getattr(target, "__name__", "")
    if not str(getattr(target, "__module__", "torch") or "torch").startswith("torch"):
        return UNKNOWN
    packet = getattr(torch.ops.aten, name, None) if name else None
    return _packet(packet) if isinstance(packet, OpOverloadPacket) else UNKNOWN


def method_behaviour(name: str) -> Behaviour:
    """Return what the tensor method of this name does."""
    packet = getattr(torch.ops.aten, name, None)
    if isinstance(packet, OpOverloadPacket):
        return _packet(packet)
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return Behaviour(Effect.WRITES, ((0, "self"),), aliases=True)
    return UNKNOWN
