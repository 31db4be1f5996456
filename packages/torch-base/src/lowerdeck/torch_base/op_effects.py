"""Effects of operators, from schemas and tables of exceptions."""

from __future__ import annotations

import inspect
import operator
from enum import Flag, auto
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

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
    """Effects of a node other than its value."""

    NONE = 0
    WRITES = auto()
    """Mutates an input."""
    RANDOM = auto()
    """Uses the global random generator."""
    EFFECT = auto()
    """Has side effects outside of the graph."""
    CHECK = auto()
    """Only raises or does nothing; its order among other checks does not matter."""
    MODE = auto()
    """Changes the mode of all later nodes (gradient mode, autocast)."""


Arguments: TypeAlias = tuple[tuple[int, str], ...]


class Behaviour(NamedTuple):
    """Effects and aliases of a callee.

    Attributes:
        writes: Positions and names of mutated arguments. If empty while ``effect`` is WRITES, all.
        aliases: Whether the result may alias an argument.
        aliased: Positions and names of arguments that the result may alias. If empty while
            ``aliases`` is True, all.
        reads_metadata_only: Whether no bytes are read, as in views and size queries.
        inplace_at: Position of the parameter ``inplace``, or -1.
        write_flag: Argument whose value False disables writes, if any.
    """

    effect: Effect = Effect.NONE
    writes: Arguments = ()
    aliases: bool = False
    aliased: Arguments = ()
    reads_metadata_only: bool = False
    inplace_at: int = -1
    write_flag: Arguments = ()


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
_METADATA_QUERIES = frozenset(
    {"_assert_tensor_metadata", "sym_numel", "sym_size", "sym_storage_offset", "sym_stride"}
)
_MODES = frozenset({"_set_grad_enabled", "_enter_autocast", "_exit_autocast"})
# Operators with aliases that their schemas do not declare, found with torch's operator samples
# (tests/test_aliases.py).
_UNDECLARED_ALIASES = frozenset(
    {
        *("_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"),
        *("alpha_dropout", "dropout", "feature_alpha_dropout", "feature_dropout"),
        *("atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "meshgrid"),
        *("cartesian_prod", "conj_physical", "einsum", "histogramdd", "sum_to_size", "type_as"),
    }
)
# Operators that mutate their statistics without declaring it, unless this argument is False
# (torch's functionalization has such a list).
_STATISTICS = frozenset({"running_mean", "running_var"})
_UNDECLARED_WRITES = {
    "batch_norm": "training",
    "cudnn_batch_norm": "training",
    "instance_norm": "use_input_stats",
    "miopen_batch_norm": "training",
    "native_batch_norm": "training",
    "_batch_norm_impl_index": "training",
}
# torch's control flow rejects results that alias arguments; delegates return new tensors.
_FRESH = frozenset(
    {
        *("associative_scan", "cond", "map_impl", "scan", "while_loop"),
        *("auto_functionalized", "auto_functionalized_v2", "executorch_call_delegate"),
    }
)


def hides_effects(target: object) -> bool:
    """Return whether an operator has undeclared aliases or mutations.

    torch's functionalization relies on schemas: if such an operator is not decomposed, writes may
    be lost.

    Args:
        target: A node's target; only operator overloads are checked.
    """
    return isinstance(target, OpOverload) and (
        _name(target) in _UNDECLARED_ALIASES or _name(target) in _UNDECLARED_WRITES
    )


def _name(operator: OpOverload) -> str:
    return schema_of(operator).name.rpartition("::")[2]


def returns_view(target: object) -> bool:
    """Return whether a non-mutating operator may return a view of an argument.

    Args:
        target: A node's target; False if it is not an operator overload.

    Example:
        >>> import torch
        >>> from lowerdeck.torch_base import returns_view
        >>> returns_view(torch.ops.aten.view.default), returns_view(torch.ops.aten.add_.Tensor)
        (True, False)
    """
    return returns_alias(target) and not written_arguments(target)


@cache
def returns_alias(target: object) -> bool:
    """Return whether an operator's schema declares that a result may alias an argument.

    Args:
        target: A node's target; False if it is not an operator overload.
    """
    return isinstance(target, OpOverload) and any(
        result.alias_info is not None for result in schema_of(target).returns
    )


@cache
def written_arguments(target: object) -> tuple[str, ...]:
    """Return the names of arguments that an operator's schema declares as mutated, in order.

    Args:
        target: A node's target; ``()`` if it is not an operator overload.

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
    """Return whether an operator mutates its first argument and returns only it.

    Args:
        target: A node's target; False if it is not an operator overload.
    """
    if not returns_alias(target):
        return False
    schema = schema_of(target)
    return len(schema.returns) == 1 and schema.arguments[0].name in written_arguments(target)


def function_behaviour(node: Node) -> Behaviour:
    """Return the behaviour of a call_function target, independent of its arguments."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        # Custom operators may be registered as having side effects later.
        return _find_behaviour(node)
    if target not in _BEHAVIOURS:
        _BEHAVIOURS[target] = _find_behaviour(node)
    return _BEHAVIOURS[target]


_BEHAVIOURS: dict[OpOverload, Behaviour] = {}
"""Cached, because ``Node.is_impure`` searches several registries."""


def _find_behaviour(node: Node) -> Behaviour:
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
        return Behaviour(Effect.CHECK, reads_metadata_only=name in _METADATA_QUERIES)
    if isinstance(target, FunctionType) and "inplace" in inspect.signature(target).parameters:
        index = list(inspect.signature(target).parameters).index("inplace")
        return behaviour._replace(inplace_at=index)
    if name in _MODES:
        return Behaviour(Effect.MODE)
    # Last: torch looks the operator up in a registry.
    if not behaviour.effect and node.is_impure():
        return behaviour._replace(effect=Effect.EFFECT)
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
    write_flag: Arguments = ()
    flag_name = _UNDECLARED_WRITES.get(_name(target))
    if flag_name is not None and not writes:
        writes = tuple((index, name) for index, name, _ in arguments if name in _STATISTICS)
        write_flag = tuple((index, name) for index, name, _ in arguments if name == flag_name)
    effect = Effect.WRITES if writes else Effect.NONE
    if torch.Tag.nondeterministic_seeded in target.tags:
        effect |= Effect.RANDOM
    if _name(target) in _UNDECLARED_ALIASES:
        return Behaviour(effect, writes, aliases=True)
    aliases = returns_alias(target)
    aliased = tuple((index, name) for index, name, alias in arguments if alias) if aliases else ()
    # Composite operators such as reshape may copy.
    is_view = aliases and not writes and composite_parts(target) is None
    reads_metadata_only = is_view or _name(target) in _METADATA_QUERIES
    return Behaviour(effect, writes, aliases, aliased, reads_metadata_only, write_flag=write_flag)


def _packet(packet: OpOverloadPacket) -> Behaviour:
    effect, aliases, writes = Effect.NONE, False, False
    in_place = packet.__name__.endswith("_") and not packet.__name__.endswith("__")
    for name in packet.overloads():  # type: ignore[no-untyped-call]
        behaviour = _overload(getattr(packet, name))
        effect |= behaviour.effect & ~Effect.WRITES
        # ``out`` overloads write only if ``out`` is in the node's kwargs.
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
    """Return the behaviour of a tensor method."""
    packet = getattr(torch.ops.aten, name, None)
    if isinstance(packet, OpOverloadPacket):
        return _packet(packet)
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return Behaviour(Effect.WRITES, ((0, "self"),), aliases=True)
    return UNKNOWN
