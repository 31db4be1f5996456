"""Effects of nodes: writes in place, random numbers, side effects and changes of mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch.fx import GraphModule, Node

from lowerdeck.torch_base._torch_private import HigherOrderOperator, NormBase, is_impure
from lowerdeck.torch_base.graphs import attribute_of
from lowerdeck.torch_base.op_effects import (
    FIRST,
    PURE,
    UNKNOWN,
    Behaviour,
    Effect,
    function_behaviour,
    method_behaviour,
)

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
        # Held, so that no other callee gets the identity of one that is known.
        self._held: list[object] = []

    def is_plain(self, node: Node) -> bool:
        """Return whether ``node`` surely does nothing but compute its value; cheap."""
        if node.op != "call_function":
            return node.op in {"placeholder", "get_attr", "output"}
        target = node.target
        plain = self._plain.get(id(target))
        if plain is None:
            known = self._functions.get(target) or function_behaviour(node)
            plain = not (
                isinstance(target, HigherOrderOperator) or known.effect or known.inplace_at >= 0
            )
            self._plain[id(target)] = plain
            self._held.append(target)
        return plain and not ("inplace" in node.kwargs or "out" in node.kwargs)

    def of(self, node: Node) -> Behaviour:
        """Return what ``node`` does."""
        if node.op == "call_function":
            return self._function(node)
        if node.op == "call_method":
            name = str(node.target)
            if name not in self._methods:
                self._methods[name] = method_behaviour(name)
            return self._methods[name]
        if node.op == "call_module":
            name = str(node.target)
            if name not in self._modules:
                self._modules[name] = self._module(name)
            return self._modules[name]
        return PURE

    def effect(self, node: Node) -> Effect:
        """Return the effects of ``node``."""
        return self.of(node).effect

    def _function(self, node: Node) -> Behaviour:
        target = node.target
        known = self._functions.get(target)
        if known is None:
            known = self._functions[target] = function_behaviour(node)
        if isinstance(target, HigherOrderOperator):
            return replace(known, effect=known.effect | self._nested(node))
        for index, name in known.spared_by:
            given = node.args[index] if 0 <= index < len(node.args) else node.kwargs.get(name)
            if given is False:
                return replace(known, effect=known.effect & ~Effect.WRITES, writes=())
        given = node.kwargs.get("inplace")
        if 0 <= known.inplace_at < len(node.args):
            given = node.args[known.inplace_at]
        if given is True:
            return Behaviour(known.effect | Effect.WRITES, FIRST, aliases=True)
        if "out" in node.kwargs and isinstance(node.kwargs["out"], Node):
            return Behaviour(known.effect | Effect.WRITES, ((-1, "out"),), aliases=True)
        return known

    def _nested(self, node: Node) -> Effect:
        """Return the effects of the graphs that a higher-order operator is given."""
        effect = Effect.NONE
        for source in node.all_input_nodes:
            if source.op != "get_attr" or self._gm is None:
                continue
            inner = attribute_of(self._gm, source)
            if isinstance(inner, GraphModule):
                effect |= self._module_effect(inner)
        return effect

    def _module(self, name: str) -> Behaviour:
        module = attribute_of(self._gm, name) if self._gm is not None else None
        if not isinstance(module, torch.nn.Module):
            return UNKNOWN
        return Behaviour(self._module_effect(module), aliases=True)

    def _module_effect(self, module: torch.nn.Module) -> Effect:
        effect = Effect.NONE
        for inner in module.modules():
            if isinstance(inner, GraphModule):
                behaviours = Behaviours(inner)
                # An operator does the same in each graph; a thousand submodules share the answers.
                behaviours._functions, behaviours._plain = self._functions, self._plain
                behaviours._held = self._held
                for node in inner.graph.nodes:
                    if not behaviours.is_plain(node):
                        effect |= behaviours.effect(node)
            elif getattr(inner, "inplace", False) is True:
                effect |= Effect.WRITES
            elif (isinstance(inner, _RANDOM_MODULES) and inner.training) or (
                isinstance(inner, torch.nn.RNNBase) and inner.dropout and inner.training
            ):
                effect |= Effect.RANDOM
            elif isinstance(inner, NormBase) and inner.training:
                effect |= Effect.EFFECT if inner.track_running_stats else Effect.NONE
            elif is_impure(inner):
                effect |= Effect.EFFECT
        return effect


def writes_in_place(gm: GraphModule) -> bool:
    """Return whether a node of ``gm`` writes what it reads, at a quarter of ``MemoryUse``'s cost.

    Args:
        gm: Its own graph is looked at, and those that its nodes are given.
    """
    known = Behaviours(gm)
    return any(
        not known.is_plain(node) and known.effect(node) & Effect.WRITES for node in gm.graph.nodes
    )
