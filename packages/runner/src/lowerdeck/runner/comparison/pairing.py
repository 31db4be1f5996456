"""Record the operators of an exported program, and match them with the events of a file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from lowerdeck.runner._torch_private import flat_graph_inputs, operator_name
from lowerdeck.runner.profile import Event


class EagerOp(NamedTuple):
    """Operator call of an exported program.

    Attributes:
        name: Its name, such as ``aten::addmm``.
        values: Copies of its tensor results.
        node: Name of its node.
        handle: Debug handle of the node, or None.
    """

    name: str
    values: tuple[torch.Tensor, ...]
    node: str
    handle: int | None


Pair = tuple[Event, EagerOp]


def record_nodes(
    program: ExportedProgram, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], list[EagerOp]]:
    """Return the flat outputs and the operators of a run of an exported program."""
    recorder = _NodeRecorder(program.graph_module)
    outputs = run_program(recorder, program, args, kwargs)
    return outputs, recorder.ops


def run_program(
    interpreter: fx.Interpreter,
    program: ExportedProgram,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[Any]:
    """Run an exported program in an interpreter, and return its flat outputs."""
    with torch.no_grad():
        results = interpreter.run(*flat_graph_inputs(program, args, kwargs))
    specs = program.graph_signature.output_specs
    return [
        result
        for spec, result in zip(specs, results, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT
    ]


class _NodeRecorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.ops: list[EagerOp] = []

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            name = operator_name(n.target) or str(n.target)
            handle = n.meta.get("debug_handle")
            self.ops.append(EagerOp(name, tensors_in(result), n.name, handle))
        return result


def tensors_in(result: object) -> tuple[torch.Tensor, ...]:
    """Return copies of the tensors in a result, because later operators may mutate them."""
    if isinstance(result, torch.Tensor):
        return (result.detach().clone(),)
    if isinstance(result, (tuple, list)):
        return tuple(copy for item in result for copy in tensors_in(item))
    return ()


def pair_last_events(events: Sequence[Event], ops: Sequence[EagerOp]) -> list[Pair]:
    """Return pairs of each node and its last event, if their shapes agree.

    An earlier event may be an intermediate result of equal shape, such as the softmax of an
    attention.

    Args:
        ops: Recorded nodes of an exported program.
    """
    by_node = {op.node: op for op in ops}
    by_handle = {op.handle: op for op in ops if op.handle is not None}
    last: dict[str, Pair] = {}
    for event in events:
        op = _op_of(event, by_node, by_handle)
        if op is not None and tensors_of(event.values):
            last.pop(op.node, None)  # keep the order of last events
            last[op.node] = event, op
    return [pair for pair in last.values() if _shapes_agree(*pair)]


def _shapes_agree(event: Event, op: EagerOp) -> bool:
    """Return whether an event's leading results have the shapes of an operator's."""
    values, expected = tensors_of(event.values)[: len(op.values)], op.values
    return bool(expected) and list(map(_rows, values)) == list(map(_rows, expected))


def _rows(value: torch.Tensor) -> tuple[int, ...]:
    """Return the shape with outer dimensions flattened, as kernels may do."""
    *outer, last = value.shape or (1,)
    return math.prod(outer), last


def _op_of(
    event: Event, by_node: Mapping[str, EagerOp], by_handle: Mapping[int, EagerOp]
) -> EagerOp | None:
    if event.place.node in by_node:
        return by_node[event.place.node]
    return next((by_handle[h] for h in event.place.handles[-1:] if h in by_handle), None)


def tensors_of(values: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among ``values``."""
    return [value for value in values if isinstance(value, torch.Tensor)]
