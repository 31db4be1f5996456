"""Effects of nodes: in-place writes, random numbers, side effects and mode changes."""

from __future__ import annotations

from functools import cache

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


class Behaviours:
    """Effects of the nodes of one graph module, cached by callee."""

    def __init__(self, gm: torch.nn.Module | None) -> None:
        self._gm = gm
        # By id: hashing an operator calls Python code. Callees are kept alive.
        self._functions: dict[int, tuple[object, Behaviour, bool]] = {}
        self._others: dict[tuple[str, str], Behaviour] = {}

    def is_plain(self, node: Node) -> bool:
        """Return whether ``node`` is known to be pure (fast, conservative)."""
        if node.op != "call_function":
            return node.op in {"placeholder", "get_attr", "output"}
        # Inlined lookup for speed.
        _, _, plain = self._functions.get(id(node.target)) or self._callee(node)
        return plain and not ("inplace" in node.kwargs or "out" in node.kwargs)

    def of(self, node: Node) -> Behaviour:
        """Return the behaviour of ``node``."""
        if node.op == "call_function":
            return self._function(node)
        if node.op not in {"call_method", "call_module"}:
            return PURE
        key = node.op, str(node.target)
        if key not in self._others:
            of_callee = method_behaviour if node.op == "call_method" else self._module
            self._others[key] = of_callee(key[1])
        return self._others[key]

    def effect(self, node: Node) -> Effect:
        """Return the effects of ``node``."""
        return self.of(node).effect

    def _callee(self, node: Node) -> tuple[object, Behaviour, bool]:
        """Return the callee of a call_function, its behaviour, and whether it is pure."""
        target = node.target
        callee = self._functions.get(id(target))
        if callee is None:
            behaviour = function_behaviour(node)
            has_effect = behaviour.effect or behaviour.inplace_at >= 0
            plain = not (has_effect or isinstance(target, HigherOrderOperator))
            callee = self._functions[id(target)] = target, behaviour, plain
        return callee

    def _function(self, node: Node) -> Behaviour:
        _, behaviour, _ = self._callee(node)
        if isinstance(node.target, HigherOrderOperator):
            return behaviour._replace(effect=behaviour.effect | self._nested(node))
        for index, name in behaviour.write_flag:
            argument = node.args[index] if 0 <= index < len(node.args) else node.kwargs.get(name)
            if argument is False:
                return _without_writes(behaviour)
        argument = node.kwargs.get("inplace")
        if 0 <= behaviour.inplace_at < len(node.args):
            argument = node.args[behaviour.inplace_at]
        if argument is True:
            return Behaviour(behaviour.effect | Effect.WRITES, FIRST, aliases=True)
        if "out" in node.kwargs and isinstance(node.kwargs["out"], Node):
            return Behaviour(behaviour.effect | Effect.WRITES, ((-1, "out"),), aliases=True)
        return behaviour

    def _nested(self, node: Node) -> Effect:
        """Return the effects of a higher-order operator's subgraphs."""
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
                # Operators behave the same in all graphs, so submodules share the cache.
                behaviours._functions = self._functions
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


@cache
def _without_writes(behaviour: Behaviour) -> Behaviour:
    return behaviour._replace(effect=behaviour.effect & ~Effect.WRITES, writes=())


def writes_in_place(gm: GraphModule) -> bool:
    """Return whether a node of ``gm`` mutates an input, faster than ``MemoryUse``.

    Args:
        gm: Its graph and subgraphs of higher-order calls are searched.
    """
    behaviours, plain = Behaviours(gm), set[int]()
    for node in gm.graph.nodes:
        if id(node.target) in plain and not node.kwargs:
            continue
        if not behaviours.is_plain(node):
            if behaviours.effect(node) & Effect.WRITES:
                return True
        elif node.op == "call_function":
            plain.add(id(node.target))
    return False
