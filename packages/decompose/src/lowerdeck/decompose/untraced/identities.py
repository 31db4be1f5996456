"""Templates of calls that trace to themselves, without tracing them.

Tracing one call takes some two milliseconds, and most distinct calls of a model come out as they
went in (57 of 76 in a llama). What such a call gives is known: the program says it, provided that
its inputs still lie in memory as they did when the program was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, Node

from lowerdeck.decompose._torch_private import traced_meta
from lowerdeck.decompose.calls.facts import TensorFacts
from lowerdeck.decompose.calls.keys import Call, fill
from lowerdeck.decompose.recording import Recording, as_dispatched
from lowerdeck.torch_base import FakeTensor, OpOverload, returns_alias, schema_of

_ATEN = torch.ops.aten

# The first counts from the start of the storage; functionalization drops the second, at times.
_TRACED = frozenset({_ATEN.as_strided.default, _ATEN.alias.default})


@dataclass(frozen=True)
class Before:
    """A call as it was in the original program.

    Attributes:
        node: The call.
        env: What the nodes of its graph have become.
    """

    node: Node
    env: Mapping[Node, Any]

    @cached_property
    def _nodes(self) -> dict[int, Node]:
        # By address: env holds what it tells. Of several that have become the same, the first.
        nodes = reversed(self.node.all_input_nodes)
        return {id(self.env[node]): node for node in nodes if node in self.env}

    def value(self, given: Any) -> Any:
        """Return what an input of the call was in the original program.

        Args:
            given: What it has become.
        """
        node = self._nodes.get(id(given))
        return None if node is None else node.meta.get("val")


def recorded(call: Call, before: Before) -> Recording | None:
    """Return what tracing a call would record where that is the call itself; else None.

    Args:
        call: A call of an operator that torch would record as it is, in no context of its own.
        before: The same in the original program.
    """
    target: Any = call.key[0]
    held = before.node.meta.get("val")
    if type(held) is not FakeTensor or not _is_plain(target):
        return None
    # What is made from nothing has options that torch fills in; symbols have nodes of their own.
    if not call.inputs or not call.is_static:
        return None
    # The recorded result has the strides that follow from the recorded inputs.
    if not lies_as_before(call, before):
        return None
    given = [before.value(each) for each in call.inputs]
    viewed = returns_alias(target)
    if viewed and (call.differentiable or any(facts.requires_grad for facts in call.facts)):
        # A view of a parameter is one that requires gradients, unless it is decomposed.
        return None
    graph = Graph()
    inputs = []
    for index, value in enumerate(given):
        node = graph.placeholder(f"given_{index}")
        node.meta["val"] = value
        inputs.append(node)
    said = (fill(call.args, inputs), fill(call.kwargs, inputs))
    args, kwargs = as_dispatched(target, *said)
    if (args, kwargs) != said:
        # Composite operators in Python hand on defaults, others do not.
        return None
    made = graph.call_function(target, args, kwargs)
    gives: Any = held.detach() if held.requires_grad else held
    made.meta = traced_meta(target, gives)
    shared = {0: [inputs.index(args[0])]} if viewed else {}
    alone = set() if viewed else {0}
    return Recording(graph, inputs, made, {}, {}, shared, alone, set(), {}, False, False, False)


def lies_as_before(call: Call, before: Before) -> bool:
    """Return whether the inputs of a call lie in memory as they did in the original program.

    What the call gave there then lies as it would now.

    Args:
        call: The call.
        before: The same in the original program.
    """
    return all(map(_is_as_before, call.facts, map(before.value, call.inputs)))


def _is_plain(target: OpOverload) -> bool:
    """Return whether an operator writes nothing and gives one tensor, which may view its first."""
    schema = schema_of(target)
    if target in _TRACED or schema.is_mutable or len(schema.returns) != 1:
        return False
    aliases = [argument.alias_info is not None for argument in schema.arguments]
    return not any(aliases[1:])


def _is_as_before(facts: Any, value: Any) -> bool:
    """Return whether an input lies in memory as it did when the program was made."""
    if not isinstance(facts, TensorFacts) or type(value) is not FakeTensor:
        return False
    return facts.key()[:-1] == TensorFacts.of(value).key()[:-1]
