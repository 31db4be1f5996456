"""Re-run each reference operator on the program's own inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from lowerdeck.runner._torch_private import flat_graph_inputs
from lowerdeck.runner.comparison.eager import tensors_in
from lowerdeck.runner.comparison.pairing import Pair, tensors_of
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


class Following:
    """Run an exported program in which correct results are replaced by another program's.

    Each operator then computes from the other program's values, and differs only by its own error.
    Numbers on both sides of a rounding boundary are one step apart after rounding, and several
    after the next layer; the tolerance would have to allow for all of it.

    Args:
        events: Events of the other program.
        pairs: The event of each node.
        agrees: Returns whether a tensor is the expected one.

    Attributes:
        expected: For each node of a pair, the expected result of its event.
        outputs: The results of the exported program, in order.
        used: Events that were used as the rounding of some node.
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
        self._given: Mapping[str, Event] = {op.node: event for event, op in pairs}
        self._rounded = [e for e in events if e.precision is not None and e.precision.at_run_time]
        self._agrees = agrees

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run the exported program once.

        Args:
            args: Its inputs by position.
            kwargs: Its inputs by name.
        """
        interpreter = _Interpreter(self._program.graph_module, self._result_of)
        with torch.no_grad():
            results = interpreter.run(*flat_graph_inputs(self._program, args, kwargs))
        specs = self._program.graph_signature.output_specs
        self.outputs = [
            result
            for spec, result in zip(specs, results, strict=True)
            if spec.kind is OutputKind.USER_OUTPUT
        ]

    def _result_of(self, node: fx.Node, result: Any, is_new: bool) -> Any:
        """Return the result of ``node`` that later nodes read."""
        event = self._given.get(node.name)
        if event is None:
            if is_new and name_of(node).startswith("dequantize"):
                return self._rounded_as(result)
            return result
        self.expected[node.name] = [
            expected_of(event, value, node) for value in tensors_in(result)
        ]
        results = tensors_of(event.values)
        # A view stays a view: a write to it changes its base.
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
        """Return the other program's rounding of the same numbers, if it has one.

        Both choose the scale from the numbers, eager perhaps for the whole tensor and the other
        for each row: only the numbers show which rows correspond.
        """
        slack = step_at_run_time(result) * (1 + 1e-4)
        for event in self._rounded:
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
        read = [self.env[value] for value in node.all_input_nodes]
        return [value for value in read if type(value) is torch.Tensor]
