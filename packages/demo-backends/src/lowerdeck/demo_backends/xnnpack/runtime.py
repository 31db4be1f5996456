"""The half of the XNNPACK backend that runs, in Python: a reference for the official one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from lowerdeck.demo_backends.errors import BlobError, DelegateInputError, DelegateRunError
from lowerdeck.demo_backends.tensor_data import view_tensor
from lowerdeck.demo_backends.xnnpack.decode import decode
from lowerdeck.demo_backends.xnnpack.image_order import images
from lowerdeck.demo_backends.xnnpack.kernels import IGNORE_RANGE, KERNELS
from lowerdeck.demo_backends.xnnpack.layout import Layout, conversion
from lowerdeck.demo_backends.xnnpack.schema import (
    CONCATENATE_KINDS,
    EXTERNAL_INPUT,
    EXTERNAL_OUTPUT,
    NONE,
    Graph,
    Node,
    Value,
)
from lowerdeck.serializer import CompileSpec

_FAULTS = (RuntimeError, ValueError, IndexError, TypeError, ArithmeticError)
_INPUTS = ("input_id", "input1_id", "filter_id", "bias_id", "input2_id")
_JOINED = ("input1_id", "input2_id", "input3_id", "input4_id", "input5_id")


@dataclass(frozen=True, slots=True)
class LoadedPayload:
    """A payload that was checked and is ready to run.

    Attributes:
        graph: Its graph.
        constants: The tensors of its constant values, by id.
        inputs: The values that the caller fills; ``external_id`` is their position.
        outputs: The values that it returns, in order.
        images: Ids of the values that lie with channels last.
    """

    graph: Graph
    constants: Mapping[int, torch.Tensor]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    images: frozenset[int] = frozenset()

    @property
    def input_count(self) -> int:
        """How many arguments of the call stand before the outputs, tensors or not."""
        return self.graph.num_externs - len(self.outputs)


class XnnpackRuntime:
    """Executes payloads with torch's kernels, node by node: slowly, and with every check."""

    def init(
        self,
        blob: memoryview,
        compile_specs: Sequence[CompileSpec],  # noqa: ARG002  (the payload says all)
        named_data: Mapping[str, memoryview],
    ) -> LoadedPayload:
        """Return the payload, read and checked.

        Args:
            blob: What ``preprocess`` made, ours or ExecuTorch's (float32 only).
            compile_specs: Not needed.
            named_data: The weights.

        Returns:
            The handle that ``execute`` wants.

        Raises:
            BlobError: The blob is truncated, damaged, of another version, inconsistent, or its
                weights are not what it says.
        """
        graph, segment = decode(blob)
        constants = {
            value.id: _constant(graph, value, segment, named_data)
            for value in graph.values
            if value.constant
        }
        inputs = [value for value in graph.values if value.flags == EXTERNAL_INPUT]
        outputs = [value for value in graph.values if value.flags == EXTERNAL_OUTPUT]
        outputs.sort(key=lambda value: value.external_id)
        _check_order(graph, {*constants, *(value.id for value in inputs)})
        first = graph.num_externs - len(outputs)
        if [value.external_id for value in outputs] != list(range(first, graph.num_externs)):
            raise BlobError("the outputs are not the last arguments of the call")
        if any(value.external_id >= first for value in inputs):
            raise BlobError("an input stands among the outputs")
        return LoadedPayload(graph, constants, tuple(inputs), tuple(outputs), images(graph))

    def input_count(self, handle: LoadedPayload) -> int:
        """Return how many inputs a payload takes."""
        return handle.input_count

    def execute(self, handle: LoadedPayload, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs for ``inputs``.

        Args:
            handle: What ``init`` returned.
            inputs: The arguments of the call; sizes among them are not looked at.

        Returns:
            New tensors, in order.

        Raises:
            DelegateInputError: Another number of inputs, or another dtype, than was compiled for.
            DelegateRunError: A node cannot be computed on these inputs.
        """
        return self.execute_logged(handle, inputs, _no_log)

    def execute_logged(
        self, handle: LoadedPayload, inputs: Sequence[torch.Tensor], log: Callable[..., None]
    ) -> list[torch.Tensor]:
        """Return the outputs for ``inputs`` and report every node.

        Args:
            handle: What ``init`` returned.
            inputs: The arguments of the call.
            log: Called with the debug identifier, the start and the end in nanoseconds and the
                outputs of each node, their dimensions in torch's order.

        Returns:
            New tensors, in order.

        Raises:
            DelegateInputError: Another number of inputs, or another dtype, than was compiled for.
            DelegateRunError: A node cannot be computed on these inputs.
        """
        if len(inputs) != handle.input_count:
            raise DelegateInputError(
                f"{handle.input_count} inputs are needed, found {len(inputs)}"
            )
        values = dict(handle.constants)
        for value in handle.inputs:
            given = inputs[value.external_id]
            if not isinstance(given, torch.Tensor) or given.dtype != torch.float32:
                raise DelegateInputError(
                    f"input {value.external_id} must be a float32 tensor, found "
                    f"{getattr(given, 'dtype', type(given).__name__)}"
                )
            last = value.external_id in handle.graph.channels_last
            values[value.id] = _arranged(given, Layout.CHANNELS_LAST) if last else given
        for node in handle.graph.nodes:
            start = time.perf_counter_ns()
            result = _run(node, values)
            output = cast("int", node.fields["output_id"])
            values[output] = result
            end = time.perf_counter_ns()
            shown = _arranged(result, Layout.PLAIN) if output in handle.images else result
            log(node.debug_handle, start, end, (shown,))
        return [
            _arranged(values[value.id], Layout.PLAIN)
            if value.external_id in handle.graph.channels_last
            else values[value.id]
            for value in handle.outputs
        ]


def _arranged(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a tensor with its dimensions permuted from the other layout to this one."""
    return tensor.permute(conversion(tensor.dim(), layout)) if tensor.dim() > 2 else tensor


def _no_log(*_: object) -> None:
    """Drop a report."""


def _run(node: Node, values: Mapping[int, torch.Tensor]) -> torch.Tensor:
    try:
        result = KERNELS[node.kind](node.fields, [values[one] for one in _input_ids(node)])
        if node.output_range is not None and node.kind not in IGNORE_RANGE:
            result = result.clamp(*node.output_range)
    except _FAULTS as error:
        raise DelegateRunError(
            f"{node.kind.name} (debug identifier {node.debug_handle}): {error}"
        ) from error
    return result


def _input_ids(node: Node) -> list[int]:
    names: Sequence[str] = _INPUTS
    if node.kind in CONCATENATE_KINDS:
        names = _JOINED[: CONCATENATE_KINDS.index(node.kind) + 2]
    ids = [cast("int", node.fields[name]) for name in names if name in node.fields]
    return [one for one in ids if one != NONE]


def _check_order(graph: Graph, known: set[int]) -> None:
    """Refuse a graph whose nodes read what is not there yet, or write what is there already."""
    for node in graph.nodes:
        missing = [one for one in _input_ids(node) if one not in known]
        if missing:
            raise BlobError(
                f"{node.kind.name} reads value {missing[0]}, which nothing has written"
            )
        output = cast("int", node.fields["output_id"])
        if output in known or output == NONE:
            raise BlobError(f"{node.kind.name} writes value {output}, which is written already")
        known.add(output)
    for value in graph.values:
        if value.flags == EXTERNAL_OUTPUT and value.id not in known:
            raise BlobError(f"nothing writes the output value {value.id}")


def _constant(
    graph: Graph, value: Value, segment: memoryview, named_data: Mapping[str, memoryview]
) -> torch.Tensor:
    constant = graph.constants[value.constant]
    if constant.key:
        if constant.key not in named_data:
            raise BlobError(
                f"the named data has no entry {constant.key}: was the blob taken out of its file, "
                "or is the .ptd missing that it came with?"
            )
        data = named_data[constant.key]
    else:
        data = segment[constant.offset : constant.offset + constant.size]
    try:
        return view_tensor(data, torch.float32, value.dims)
    except ValueError as error:
        raise BlobError(f"constant {value.constant}: {error}") from error
