"""Re-run each reference operator on the program's own inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from lowerdeck.runner.comparison.pairing import Pair, run_program, tensors_in, tensors_of
from lowerdeck.runner.comparison.quanta import (
    Expected,
    expected_of,
    grid_of,
    name_of,
    step_at_run_time,
)
from lowerdeck.runner.profile import Event
from lowerdeck.torch_base import storage_identity

Agrees = Callable[[torch.Tensor, Expected], bool]


class ReferenceRun:
    """Run an exported program, with correct results replaced by those of another program.

    Each operator then reads the other program's values, and differs only by its own error.
    Otherwise a value near a rounding boundary would cause a difference of one step, and of several
    after the next layer.

    Args:
        events: Events of the other program.
        pairs: The event of each node.
        agrees: Returns whether a tensor equals the expected one within the tolerance.

    Attributes:
        expected: Expected results of the paired event, by node name.
        outputs: The results of the exported program, in order.
        used: Events whose rounded values replaced those of a node.
    """

    def __init__(
        self,
        program: ExportedProgram,
        events: Sequence[Event],
        pairs: Sequence[Pair],
        agrees: Agrees,
    ) -> None:
        self.expected: dict[str, list[Expected]] = {}
        self.outputs: list[Any] = []
        self.used: list[Event] = []
        self._program = program
        self._event_of_node: Mapping[str, Event] = {op.node: event for event, op in pairs}
        self._rounding_events = [
            e for e in events if e.precision is not None and e.precision.at_run_time
        ]
        self._agrees = agrees

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run the exported program once."""
        interpreter = _Interpreter(self._program.graph_module, self._result_of)
        self.outputs = run_program(interpreter, self._program, args, kwargs)

    def _result_of(self, node: fx.Node, result: Any, is_new: bool) -> Any:
        """Return the value of ``node`` for its users."""
        event = self._event_of_node.get(node.name)
        if event is None:
            if is_new and name_of(node).startswith("dequantize"):
                return self._rounded_as(result)
            return result
        self.expected[node.name] = [
            expected_of(event, value, node) for value in tensors_in(result)
        ]
        results = tensors_of(event.values)
        # Keep views: writes to them must change their base.
        if not is_new or len(results) != 1 or results[0].numel() != result.numel():
            return result
        value = results[0].reshape(result.shape)
        if not self._agrees(value, self.expected[node.name][0]):
            return result
        grid = grid_of(event, node)
        if grid is not None and not result.is_floating_point():
            value = grid.integers(value)
        return value.to(result.dtype, copy=True)

    def _rounded_as(self, result: torch.Tensor) -> torch.Tensor:
        """Return the other program's rounding of ``result``, or ``result`` if no event matches.

        Scales are computed at run time, per tensor or per row, so an event is matched by its
        values.
        """
        slack = step_at_run_time(result) * (1 + 1e-4)
        for event in self._rounding_events:
            (values,) = tensors_of(event.values)
            if values.numel() != result.numel():
                continue
            reshaped = values.reshape(result.shape)
            if self._agrees(reshaped, Expected(result, slack)):
                self.used.append(event)
                return reshaped.to(result.dtype, copy=True)
        return result


class _Interpreter(fx.Interpreter):
    def __init__(
        self, module: fx.GraphModule, change: Callable[[fx.Node, Any, bool], Any]
    ) -> None:
        super().__init__(module)
        self._change = change

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "call_function":
            return result
        memory = {storage_identity(tensor) for tensor in self._tensors_read(n)}
        is_new = type(result) is torch.Tensor and storage_identity(result) not in memory
        return self._change(n, result, is_new)

    def _tensors_read(self, node: fx.Node) -> list[torch.Tensor]:
        values = [self.env[value] for value in node.all_input_nodes]
        return [value for value in values if type(value) is torch.Tensor]
