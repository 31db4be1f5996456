"""Reference runtime of the XNNPACK backend in Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lowerdeck.serializer import (
    CompileSpec,
    FormatError,
    XnnGraph,
    XnnNode,
    XnnValue,
    decode_payload,
    verify_payload,
)
from lowerdeck.xnnpack.errors import BlobError, DelegateInputError, DelegateRunError
from lowerdeck.xnnpack.payload import LAYOUT_MARK, Layout, conversion
from lowerdeck.xnnpack.runtime.kernels import IGNORE_RANGE, KERNELS
from lowerdeck.xnnpack.runtime.layouts import channels_last_values
from lowerdeck.xnnpack.runtime.numbers import (
    COMPUTED,
    PROGRAM_DTYPES,
    bias_factor,
    dequantized,
    dequantized_constant,
    fake_quantized,
    quantized,
)
from lowerdeck.xnnpack.runtime.precision import precision_of

_FAULTS = (RuntimeError, ValueError, IndexError, TypeError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class LoadedPayload:
    """A validated payload, ready to run.

    Attributes:
        constants: Dequantised constants, by value id.
        inputs: Input values; ``external_id`` is the argument's position.
        outputs: Output values, in order.
        channels_last_arguments: Positions of the channels-last arguments, read from the payload's
            version string.
        channels_last_values: Ids of the values with the channels-last layout.
        bias_factors: Factor of each node's bias, by node number.
        values: All values by id.
    """

    graph: XnnGraph
    constants: Mapping[int, torch.Tensor]
    inputs: tuple[XnnValue, ...]
    outputs: tuple[XnnValue, ...]
    channels_last_arguments: frozenset[int] = frozenset()
    channels_last_values: frozenset[int] = frozenset()
    bias_factors: Mapping[int, torch.Tensor] = field(default_factory=dict)
    values: Mapping[int, XnnValue] = field(default_factory=dict)

    @property
    def input_count(self) -> int:
        """Number of arguments before the outputs, including non-tensors."""
        return self.graph.num_externs - len(self.outputs)


class XnnpackRuntime:
    """Executes payloads node by node with torch's kernels."""

    def init(
        self,
        blob: memoryview,
        compile_specs: Sequence[CompileSpec],  # noqa: ARG002  (the payload says all)
        named_data: Mapping[str, memoryview],
    ) -> LoadedPayload:
        """Return the decoded and validated payload.

        Args:
            blob: A payload of this package or of ExecuTorch.

        Returns:
            The handle for ``execute``.

        Raises:
            BlobError: The blob is truncated, damaged, of another version or inconsistent, or its
                weights do not match it.
        """
        graph = _decode_and_check(blob, {key: len(data) for key, data in named_data.items()})
        values = {value.id: value for value in graph.values}
        try:
            constants = {
                value.id: dequantized_constant(graph, value, named_data)
                for value in graph.values
                if value.constant
            }
            factors = {
                number: bias_factor(node, values, graph, named_data)
                for number, node in enumerate(graph.nodes)
            }
        except _FAULTS as error:
            if isinstance(error, BlobError):
                raise
            raise BlobError(f"its constants do not fit together: {error}") from error
        inputs = [value for value in graph.values if value.flags == XnnValue.INPUT]
        outputs = [value for value in graph.values if value.flags == XnnValue.OUTPUT]
        outputs.sort(key=_argument_position)
        _check_order(graph, {*constants, *(value.id for value in inputs)})
        first = graph.num_externs - len(outputs)
        if [value.external_id for value in outputs] != list(range(first, graph.num_externs)):
            raise BlobError("the outputs are not the last arguments of the call")
        if any(_argument_position(value) >= first for value in inputs):
            raise BlobError("an input is among the outputs")
        channels_last = _channels_last_arguments(graph.version)
        return LoadedPayload(
            *(graph, constants, tuple(inputs), tuple(outputs), channels_last),
            channels_last_values(graph, channels_last),
            {number: factor for number, factor in factors.items() if factor is not None},
            values,
        )

    def input_count(self, handle: LoadedPayload) -> int:
        """Return the number of inputs of a payload."""
        return handle.input_count

    def execute(self, handle: LoadedPayload, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs for ``inputs``.

        Args:
            inputs: The arguments of the call; others than tensors, such as sizes, are ignored.

        Returns:
            New tensors, in order.

        Raises:
            DelegateInputError: Number or dtypes of the inputs differ from the compiled ones.
            DelegateRunError: A node cannot be computed on these inputs.
        """
        return self.execute_logged(handle, inputs, None)

    def execute_logged(
        self,
        handle: LoadedPayload,
        inputs: Sequence[torch.Tensor],
        log: Callable[..., None] | None,
    ) -> list[torch.Tensor]:
        """Return the outputs for ``inputs``, logging every node.

        Args:
            inputs: The arguments of the call.
            log: Called with the debug identifier, the start and the end in nanoseconds, the
                outputs (dimensions in torch's order), the operator and the precision of each node.

        Returns:
            New tensors, in order.

        Raises:
            DelegateInputError: Number or dtypes of the inputs differ from the compiled ones.
            DelegateRunError: A node cannot be computed on these inputs.
        """
        if len(inputs) != handle.input_count:
            raise DelegateInputError(f"found {len(inputs)} inputs, expected {handle.input_count}")
        values = dict(handle.constants)
        for value in handle.inputs:
            tensor = inputs[_argument_position(value)]
            dtype = PROGRAM_DTYPES[value.dtype]
            if not isinstance(tensor, torch.Tensor) or _view_dtype(tensor, dtype) != dtype:
                name = str(dtype).removeprefix("torch.")
                raise DelegateInputError(
                    f"input {value.external_id} must be a {name} tensor, found "
                    f"{getattr(tensor, 'dtype', type(tensor).__name__)}"
                )
            tensor = dequantized(tensor, value)
            if value.external_id in handle.channels_last_arguments:
                tensor = _convert_layout(tensor, Layout.CHANNELS_LAST)
            values[value.id] = tensor
        for number, node in enumerate(handle.graph.nodes):
            start = time.perf_counter_ns()
            (output,) = node.outputs
            result = _run(node, values, handle.bias_factors.get(number), handle.values[output])
            values[output] = result
            end = time.perf_counter_ns()
            if log is not None:
                if output in handle.channels_last_values:
                    result = _convert_layout(result, Layout.PLAIN)
                precision = precision_of(node, handle.values)
                log(node.debug_handle, start, end, (result,), node.operator.label, precision)
        return [
            quantized(
                _convert_layout(values[value.id], Layout.PLAIN)
                if value.external_id in handle.channels_last_arguments
                else values[value.id],
                value,
            )
            for value in handle.outputs
        ]


def _view_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to reinterpret a tensor's bytes as: int8 for bools, else its own."""
    is_bool = tensor.dtype == torch.bool and dtype == torch.int8
    return dtype if is_bool else tensor.dtype


def _convert_layout(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a tensor permuted from the other layout to ``layout``."""
    return tensor.permute(conversion(tensor.dim(), layout)) if tensor.dim() > 2 else tensor


def _run(
    node: XnnNode,
    values: Mapping[int, torch.Tensor],
    factor: torch.Tensor | None,
    output: XnnValue,
) -> torch.Tensor:
    try:
        inputs = [values[value_id] for value_id in node.inputs]
        if factor is not None:
            inputs[2] = inputs[2].reshape(-1) * factor
        result = KERNELS[node.operator](node.fields, inputs)
        if node.output_range is not None and node.operator not in IGNORE_RANGE:
            result = result.clamp(*node.output_range)
        result = fake_quantized(result, output)
    except _FAULTS as error:
        raise DelegateRunError(
            f"{node.operator.label} (debug identifier {node.debug_handle}): {error}"
        ) from error
    return result


def _argument_position(value: XnnValue) -> int:
    return -1 if value.external_id is None else value.external_id


def _decode_and_check(blob: memoryview, named: Mapping[str, int]) -> XnnGraph:
    """Decode a payload and check that both runtimes can execute it."""
    try:
        graph = decode_payload(blob)
        _check_computable(graph)
        verify_payload(graph, named)
    except FormatError as error:
        raise BlobError(str(error)) from error
    return graph


def _check_computable(graph: XnnGraph) -> None:
    for value in graph.values:
        supported = value.dtype in COMPUTED
        outside = value.external_id is None or value.dtype in PROGRAM_DTYPES
        if not (supported and outside) or value.dynamic_dtype:
            raise BlobError(
                f"value {value.id} is {value.dtype.name}, which this runtime does not compute, "
                "or not as an argument of the call: the runtime is a reference for the payloads "
                "of this package. Run the file in the official runtime"
            )
    for node in graph.nodes:
        if node.operator not in KERNELS:
            raise BlobError(
                f"this runtime does not compute {node.operator.label}: the runtime is a reference "
                "for the payloads of this package. Run the file in the official runtime"
            )


def _channels_last_arguments(version: str) -> frozenset[int]:
    """Return the positions that a payload's version string lists."""
    _, mark, positions = version.partition(LAYOUT_MARK)
    words = positions.split(" ")[1:] if mark else []
    if not all(word.isascii() and word.isdigit() and len(word) < 6 for word in words):
        raise BlobError(f"the version string {version[:60]!r} does not list positions")
    return frozenset(map(int, words))


def _check_order(graph: XnnGraph, defined: set[int]) -> None:
    """Refuse a graph whose nodes are not in topological order."""
    for node in graph.nodes:
        missing = [value_id for value_id in node.inputs if value_id not in defined]
        if missing:
            raise BlobError(
                f"{node.operator.label} reads value {missing[0]}, which no earlier node wrote"
            )
        defined.update(node.outputs)
