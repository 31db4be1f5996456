"""Compare what two exports of one model compute."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from lowerdeck.torch_base import (
    SYMBOLS,
    OpOverload,
    expression_of,
    schema_of,
)
from lowerdeck.unflatten._torch_private import AUTOCAST_REGION, TRACEPOINT
from lowerdeck.unflatten.calls.carrying import is_itself
from lowerdeck.unflatten.trace.flat_items import MODE_REGIONS, mode_arguments

_Value = Any
"""A name that stands for whatever is computed in one way, or a tuple of such."""


def compute_the_same(one: ExportedProgram, other: ExportedProgram) -> bool:
    """Return whether two exports of one model compute the same results and make the same writes.

    What nobody reads, the order of what writes nothing, names, and where regions without
    gradients begin do not matter.
    """
    known: dict[object, str] = {}
    return _Outcome(known).of_program(one) == _Outcome(known).of_program(other)


class _Outcome:
    """Finds what a program returns and writes.

    Args:
        known: The name of each way to compute a value; filled.
    """

    def __init__(self, known: dict[object, str]) -> None:
        self._known = known
        self._writes: list[_Value] = []

    def of_program(self, program: ExportedProgram) -> object:
        specs = program.graph_signature.input_specs
        given = [
            self._name(("input", number if spec.target is None else spec.target))
            for number, spec in enumerate(specs)
        ]
        return self._graph(program.graph_module, given, ()), self._writes

    def _name(self, way: object) -> str:
        return self._known.setdefault(way, f"%{len(self._known)}")

    def _graph(
        self, module: GraphModule, given: Sequence[_Value], mode: tuple[object, ...]
    ) -> _Value:
        values: dict[Node, _Value] = {}
        inputs = iter(given)
        for node in module.graph.nodes:
            if node.op == "output":
                return _filled(node.args[0], values)
            if node.op == "placeholder":
                values[node] = next(inputs)
            else:
                values[node] = self._value(node, module, values, mode)
        return None

    def _value(
        self,
        node: Node,
        module: GraphModule,
        values: dict[Node, _Value],
        mode: tuple[object, ...],
    ) -> _Value:
        if node.op == "get_attr":
            held = operator.attrgetter(str(node.target))(module)
            if not isinstance(held, GraphModule):
                return self._name(("attribute", node.target))
            taken = len(held.graph.find_nodes(op="placeholder"))
            own = [self._name(("operand", number)) for number in range(taken)]
            return self._name(("graph", repr(self._graph(held, own, mode))))
        if node.target in MODE_REGIONS:
            switched, body, operands = mode_arguments(node)
            held = operator.attrgetter(str(getattr(body, "target", body)))(module)
            inner = (*mode, *switched) if node.target is AUTOCAST_REGION else mode
            return self._graph(held, _filled(operands, values), inner)
        args, kwargs = _filled((node.args, node.kwargs), values)
        if node.target is TRACEPOINT:
            return args
        if is_itself(node):
            return args[0]
        if node.target is operator.getitem and isinstance(args[0], (tuple, list)):
            return args[0][args[1]]
        number = node.meta.get("val")
        if isinstance(number, SYMBOLS):
            return self._name(("size", str(expression_of(number))))
        found = self._name((str(node.target), repr((args, kwargs)), mode))
        if isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable:
            self._writes.append(found)
        return found


def _filled(value: Any, values: dict[Node, _Value]) -> Any:
    return map_aggregate(value, lambda item: values[item] if isinstance(item, Node) else item)
