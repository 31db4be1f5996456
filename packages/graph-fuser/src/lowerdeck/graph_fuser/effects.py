"""Which nodes do more than compute: they write, draw random numbers, or touch the world."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag, auto
from typing import TypeAlias

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node

from lowerdeck.graph_fuser.attributes import attribute, has_attribute


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


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What the callee of a node does.

    Attributes:
        effect: Its effects.
        writes: Positions and names of the arguments that it writes; empty with WRITES means all.
        aliases: Whether its result may share memory with what it reads.
    """

    effect: Effect = Effect.NONE
    writes: tuple[tuple[int, str], ...] = ()
    aliases: bool = False


_PURE = Behaviour()
_UNKNOWN = Behaviour(aliases=True)
_FIRST: tuple[tuple[int, str], ...] = ((0, "input"),)
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
_MODES = frozenset({"_set_grad_enabled", "_enter_autocast", "_exit_autocast"})
_RANDOM_MODULES = (
    torch.nn.Dropout,
    torch.nn.Dropout1d,
    torch.nn.Dropout2d,
    torch.nn.Dropout3d,
    torch.nn.AlphaDropout,
    torch.nn.FeatureAlphaDropout,
    torch.nn.RReLU,
)

Target: TypeAlias = Callable[..., object] | str


class Behaviours:
    """Tells what each node of one graph module does; the answer for a callee is kept."""

    def __init__(self, gm: torch.nn.Module | None) -> None:
        self._gm = gm
        self._functions: dict[Target, Behaviour] = {}
        self._methods: dict[str, Behaviour] = {}
        self._modules: dict[str, Behaviour] = {}
        # By identity: hashing an operator is a call into Python, and every node asks.
        self._plain: dict[int, bool] = {}

    def is_plain(self, node: Node) -> bool:
        """Return whether ``node`` surely does nothing but compute its value; cheap."""
        if node.op != "call_function":
            return node.op in {"placeholder", "get_attr", "output"}
        target = node.target
        plain = self._plain.get(id(target))
        if plain is None:
            plain = not isinstance(target, HigherOrderOperator) and not self._function(node).effect
            self._plain[id(target)] = plain
        return plain and not ("inplace" in node.kwargs or "out" in node.kwargs)

    def of(self, node: Node) -> Behaviour:
        """Return what ``node`` does."""
        if node.op == "call_function":
            return self._function(node)
        if node.op == "call_method":
            name = str(node.target)
            if name not in self._methods:
                self._methods[name] = _method(name)
            return self._methods[name]
        if node.op == "call_module":
            name = str(node.target)
            if name not in self._modules:
                self._modules[name] = self._module(name)
            return self._modules[name]
        return _PURE

    def effect(self, node: Node) -> Effect:
        """Return the effects of ``node``."""
        return self.of(node).effect

    def _function(self, node: Node) -> Behaviour:
        target = node.target
        known = self._functions.get(target)
        if known is None:
            known = self._functions[target] = _function(node)
        if isinstance(target, HigherOrderOperator):
            return Behaviour(known.effect | self._nested(node), known.writes, known.aliases)
        if node.kwargs.get("inplace") is True:
            return Behaviour(known.effect | Effect.WRITES, _FIRST, aliases=True)
        if "out" in node.kwargs and isinstance(node.kwargs["out"], Node):
            return Behaviour(known.effect | Effect.WRITES, ((-1, "out"),), aliases=True)
        return known

    def _nested(self, node: Node) -> Effect:
        """Return the effects of the graphs that a higher-order operator is given."""
        effect = Effect.NONE
        for source in node.all_input_nodes:
            if source.op != "get_attr" or self._gm is None:
                continue
            name = str(source.target)
            if has_attribute(self._gm, name):
                inner = attribute(self._gm, name)
                if isinstance(inner, GraphModule):
                    effect |= _module_effect(inner)
        return effect

    def _module(self, name: str) -> Behaviour:
        if self._gm is None or not has_attribute(self._gm, name):
            return _UNKNOWN
        module = attribute(self._gm, name)
        if not isinstance(module, torch.nn.Module):
            return _UNKNOWN
        return Behaviour(_module_effect(module), aliases=True)


def _module_effect(module: torch.nn.Module) -> Effect:
    effect = Effect.NONE
    for inner in module.modules():
        if isinstance(inner, GraphModule):
            behaviours = Behaviours(inner)
            for node in inner.graph.nodes:
                effect |= behaviours.effect(node)
        elif getattr(inner, "inplace", False) is True:
            effect |= Effect.WRITES
        elif (isinstance(inner, _RANDOM_MODULES) and inner.training) or (
            isinstance(inner, torch.nn.RNNBase) and inner.dropout and inner.training
        ):
            effect |= Effect.RANDOM
        elif isinstance(inner, torch.nn.modules.batchnorm._NormBase) and inner.training:
            effect |= Effect.EFFECT if inner.track_running_stats else Effect.NONE
        elif getattr(inner, "_is_impure", False):
            effect |= Effect.EFFECT
    return effect


def _function(node: Node) -> Behaviour:
    target = node.target
    name = getattr(target, "__name__", "")
    if isinstance(target, OpOverload):
        found = _overload(target)
        name = target._schema.name.rpartition("::")[2]
    elif target in _INPLACE_OPERATORS:
        found = Behaviour(Effect.WRITES, ((0, "a"),), aliases=True)
    elif target is operator.setitem:
        return Behaviour(Effect.WRITES, ((0, "a"),))
    elif target is operator.getitem:
        return _UNKNOWN
    elif getattr(target, "__module__", "") in {"_operator", "math", "builtins"}:
        return _PURE
    elif isinstance(target, OpOverloadPacket):
        found = _packet(target)
    else:
        found = _by_name(target)
    if name in _CHECKS:
        return Behaviour(Effect.CHECK)
    if name in _MODES:
        return Behaviour(Effect.MODE)
    # torch's own verdict last: it knows what was registered as having an effect.
    if not found.effect and node.is_impure():
        return Behaviour(Effect.EFFECT, found.writes, found.aliases)
    return found


def _overload(target: OpOverload) -> Behaviour:
    schema = target._schema
    effect = Effect.NONE
    writes = tuple(
        (-1 if argument.kwarg_only else place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if writes:
        effect |= Effect.WRITES
    if torch.Tag.nondeterministic_seeded in target.tags:
        effect |= Effect.RANDOM
    # Dropout hands its input on unchanged outside training, though its schema does not say so.
    aliases = any(result.alias_info is not None for result in schema.returns)
    return Behaviour(effect, writes, aliases or "dropout" in schema.name)


def _packet(packet: OpOverloadPacket) -> Behaviour:
    effect, aliases, writes = Effect.NONE, False, False
    in_place = packet.__name__.endswith("_") and not packet.__name__.endswith("__")
    for name in packet.overloads():  # type: ignore[no-untyped-call]
        found = _overload(getattr(packet, name))
        effect |= found.effect & ~Effect.WRITES
        # Overloads with ``out`` write only where it is given, which the node's kwargs show.
        writes |= in_place and bool(found.effect & Effect.WRITES)
        aliases |= found.aliases and not (found.writes and not in_place)
    if writes:
        return Behaviour(effect | Effect.WRITES, ((0, "self"),), aliases=True)
    return Behaviour(effect, (), aliases)


def _by_name(target: object) -> Behaviour:
    name = getattr(target, "__name__", "")
    if not str(getattr(target, "__module__", "torch") or "torch").startswith("torch"):
        return _UNKNOWN
    packet = getattr(torch.ops.aten, name, None) if name else None
    return _packet(packet) if isinstance(packet, OpOverloadPacket) else _UNKNOWN


def _method(name: str) -> Behaviour:
    packet = getattr(torch.ops.aten, name, None)
    if isinstance(packet, OpOverloadPacket):
        return _packet(packet)
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return Behaviour(Effect.WRITES, ((0, "self"),), aliases=True)
    return _UNKNOWN
