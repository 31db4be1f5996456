"""``preprocess`` of the XNNPACK backend."""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from typing import Any, ClassVar

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.types import IntLikeType as Dim

from lowerdeck.decompose import on_cpu
from lowerdeck.lowered_module import (
    DECISION,
    BackendDetails,
    CompileSpec,
    DelegateMappingBuilder,
    PreprocessResult,
    constant_tensors,
    fold_node,
    foldable_nodes,
)
from lowerdeck.serializer import XnnEncoding, XnnOperator, encode_payload
from lowerdeck.torch_base import arguments_of, collector_held, describe_node, size_range
from lowerdeck.xnnpack.compile.decisions import decisions_of, restore_supported
from lowerdeck.xnnpack.compile.external_data import data_by_file
from lowerdeck.xnnpack.compile.precision import precision_of
from lowerdeck.xnnpack.emit import (
    Call,
    Emission,
    Quantized,
    Tracked,
    float_of,
    is_fixed,
    note_function,
    shape_of,
    tidy,
)
from lowerdeck.xnnpack.errors import UnsupportedNodeError
from lowerdeck.xnnpack.operators.contract import ASSERTION, INNER_TENSOR, FloatNeededError
from lowerdeck.xnnpack.operators.quantization import (
    DEQUANTIZE,
    QUANTIZATION,
    name_of,
    static_encoding,
)
from lowerdeck.xnnpack.operators.quantized_constants import dequantized_constant, permuted_constant
from lowerdeck.xnnpack.operators.storage import storage_of
from lowerdeck.xnnpack.operators.table import SUPPORTED, entry_of, refusal
from lowerdeck.xnnpack.payload import BFLOAT, FLOAT, HALF, TRUTH, int8, layout_of, layout_text

_ATEN = torch.ops.aten
_FUNCTIONS: dict[object, XnnOperator] = {
    _ATEN.cos.default: XnnOperator.COS,
    _ATEN.sin.default: XnnOperator.SIN,
}
_EXTERNAL = {torch.float16: HALF, torch.bfloat16: BFLOAT, torch.bool: TRUTH}
SIZES = (int, torch.SymInt)
_WINDOWS = ("Convolution", "Pooling")
"""Tables of nodes that leave height and width of their results unset if the batch is empty."""
_LOG = logging.getLogger("lowerdeck.xnnpack")


class XnnpackBackend(BackendDetails):
    """Compiles partitions to payloads of the official runtime's XNNPACK delegate.

    Weights are stored as named data, deduplicated by content hash; those tagged with
    ``delegate_constant_tag`` go to the `.ptd` file of that name.
    """

    # Part of cache keys: releases may compile the same partition differently.
    version: ClassVar[str] = metadata.version("lowerdeck-xnnpack")
    reads_only = True
    supported_operators: ClassVar[tuple[str, ...]] = SUPPORTED

    @staticmethod
    @collector_held()  # thousands of nodes allocate as many long-lived records
    def preprocess(
        edge_program: ExportedProgram,
        compile_specs: list[CompileSpec],
    ) -> PreprocessResult:
        """Return a partition's payload, debug map and weights as named data.

        Args:
            edge_program: The partition, in training IR or in core ATen.
            compile_specs: ``precision`` with ``fp16`` or ``fp32``, or none.

        Returns:
            The result, whose debug identifiers are the payload's node numbers.

        Raises:
            UnsupportedNodeError: XNNPACK cannot compute a node, or would compute it wrongly.
            QuantizationError: A scale or zero point is invalid.
        """
        # Constants are folded on the CPU.
        edge_program = on_cpu(edge_program)
        constants = constant_tensors(edge_program)
        decisions = decisions_of(edge_program.graph, constants)
        whole = restore_supported(edge_program, constants, decisions=decisions)
        precision = precision_of(compile_specs)
        decided = {node for node in whole.graph.nodes if decisions and DECISION in node.meta}
        emission = emit_partition(edge_program, whole.graph, constants, precision, decided)
        for name, reason in emission.in_float.items():
            _LOG.info("%s is computed in float: %s", name, reason)
        debug_map = DelegateMappingBuilder()
        for number, sources in enumerate(emission.sources):
            nodes = tuple(original for node in sources for original in whole.sources_of(node))
            if any("debug_handle" in node.meta for node in nodes):
                debug_map.insert_delegate_mapping_entry(nodes, identifier=number)
        return PreprocessResult(
            processed_bytes=encode_payload(emission.graph),
            debug_handle_map=debug_map.get_delegate_mapping(),
            data_store_output=data_by_file(emission, whole.graph),
        )


def emit_partition(
    program: ExportedProgram,
    graph: fx.Graph,
    constants: Mapping[str, torch.Tensor],
    precision: str | None = None,
    decided: Collection[fx.Node] = (),
) -> Emission:
    """Return the payload of one partition before serialisation.

    Args:
        graph: The graph to emit: that of the program, or an equivalent one.
        constants: Tensors of constant placeholders, by name.
        precision: ``"fp16"`` to store float32 filters as float16, ``"fp32"`` to compute float16
            in float32.
        decided: Calls that the partitioner has already checked.

    Raises:
        UnsupportedNodeError: XNNPACK cannot compute a node, or would compute it wrongly.
    """
    emission = Emission(half_weights=precision == "fp16", ranges=program.range_constraints)
    user_inputs = set(program.graph_signature.user_inputs)
    inputs = [
        placeholder
        for placeholder in graph.find_nodes(op="placeholder")
        if placeholder.name in user_inputs
    ]
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in constants:
            tensor = constants[node.name]
            emission.scratch.add_existing(tensor)
            emission.define(node, Tracked.of(tensor))
    for position, node in enumerate(inputs):
        # Non-tensor arguments, such as sizes, have no value.
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            layout, encoding = layout_of(value), _input_encoding(node, value.dtype)
            emission.define(
                node, emission.external_input(shape_of(node), position, layout, encoding)
            )
    ahead = {node.name for node in foldable_nodes(graph.nodes, constants)}
    known_names = {*constants, *ahead}
    absorbed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and not (node in emission or node in absorbed):
            if node.target is operator.getitem or isinstance(node.meta.get("val"), SIZES):
                continue  # defined together with its source; sizes are read at run time
            if node.target is ASSERTION:
                continue  # a payload is only valid for the dtypes that it was compiled for
            if node.name in ahead:
                _fold(emission, node)
                continue
            first = len(emission.sources)
            if node not in decided:
                _require_support(node, known_names)
            _emit_node(emission, node, known_names, halves=precision != "fp32")
            chain = _chain(emission, node)
            absorbed.update(chain)
            emission.sources[first:] = [tuple(chain)] * (len(emission.sources) - first)
    outputs: Any = graph.output_node().args[0]
    _emit_outputs(emission, outputs, len(inputs), program.range_constraints)
    emission.graph.num_externs = len(inputs) + len(outputs)
    emission.graph.version = layout_text(emission.channels_last)
    tidy(emission)
    return emission


def _input_encoding(node: fx.Node, dtype: torch.dtype) -> XnnEncoding:
    if dtype != torch.int8:
        return _EXTERNAL.get(dtype, FLOAT)  # bools: the partitioner checked their users
    # The nodes that dequantise one input have the same scale.
    readers = [user for user in node.users if name_of(user) == DEQUANTIZE]
    if not readers:
        raise UnsupportedNodeError(
            f"XnnpackBackend cannot take the integer input {node.name}: no node dequantises it"
        )
    return static_encoding(readers[0])


def _require_support(node: fx.Node, constants: Collection[str]) -> None:
    reason = refusal(node, constants)
    if reason is not None:
        raise UnsupportedNodeError(
            f"XnnpackBackend cannot compile {describe_node(node)}: {reason}; leave it untagged"
        )


def _emit_node(
    emission: Emission, node: fx.Node, constants: Collection[str], *, halves: bool
) -> None:
    constant_inputs = [
        emission.of(source).is_constant for source in node.all_input_nodes if source in emission
    ]
    if all(constant_inputs) and len(constant_inputs) == len(node.all_input_nodes):
        _fold(emission, node)
        return
    entry = entry_of(node)
    assert entry is not None
    call = Call(node, arguments_of(node), constants)
    if name_of(node) in QUANTIZATION:
        entry.emit(emission, call)
        return

    def encoding_of(source: fx.Node) -> XnnEncoding | None:
        return _stored_as(emission.of(source))

    storage = storage_of(call, entry, encoding_of, halves=halves)
    if storage.in_float is not None:
        emission.in_float[node.name] = storage.in_float
    try:
        with emission.stored(storage.reads, storage.writes):
            entry.emit(emission, call)
    except FloatNeededError as why:
        emission.in_float[node.name] = str(why)
        with emission.stored(FLOAT, FLOAT):
            entry.emit(emission, call)


def _stored_as(tracked: Tracked) -> XnnEncoding | None:
    """Return a tensor's encoding, None for constants other than 8-bit integers."""
    if not tracked.is_constant or tracked.encoding.is_int8:
        return tracked.encoding
    return None


def _chain(emission: Emission, node: fx.Node) -> list[fx.Node]:
    """Return a node and the single users that follow it, up to the first with a value."""
    chain = [node]
    while chain[-1] not in emission and len(chain[-1].users) == 1:
        chain.append(next(iter(chain[-1].users)))
    return chain


def _fold(emission: Emission, node: fx.Node) -> None:
    """Constant-fold a node."""

    def data(node: fx.Node) -> Any:
        stored = emission.of(node).data
        # Data movement does not need a conversion to float32.
        if moves and isinstance(stored, torch.Tensor):
            return stored
        return emission.constant(node)

    entry = entry_of(node)
    moves = entry is not None and not entry.computes
    if name_of(node) == INNER_TENSOR:
        holder, name = node.args
        tensor = getattr(emission.of(holder).data, str(name)).detach()  # type: ignore[arg-type]
        emission.scratch.add_existing(tensor)
        emission.define(node, Tracked.of(tensor))
        return
    quantized = _folded_integers(emission, node)
    if quantized is not None:
        emission.define(node, _integers(quantized))
        return
    function = _FUNCTIONS.get(node.target)
    if function is None:
        result = fold_node(node, data)
    else:
        result = note_function(emission, function, data(node.all_input_nodes[0]))
    if isinstance(result, torch.Tensor):
        emission.define(node, Tracked.of(result))
        return
    for user in node.users:
        piece = result[user.args[1]]
        emission.define(user, Tracked.of(piece))


def _folded_integers(emission: Emission, node: fx.Node) -> Quantized | None:
    """Constant-fold a node on integers; return None if it needs floats."""
    source = next(iter(node.all_input_nodes), None)
    if source is None or source not in emission:
        return None
    data = emission.of(source).data
    if isinstance(data, Quantized):
        return permuted_constant(node, data)
    return dequantized_constant(node, emission.constant)  # type: ignore[arg-type]


def _integers(quantized: Quantized) -> Tracked:
    tracked = Tracked(tuple(quantized.data.shape), quantized)
    if quantized.axis is None and not quantized.group:
        scale, zero = float_of(float(quantized.scales)), int(quantized.zero_points)
        tracked.encoding = int8(scale, zero)
    return tracked


def _emit_outputs(
    emission: Emission,
    outputs: Sequence[fx.Node | None],
    first: int,
    ranges: Mapping[Any, Any],
) -> None:
    has_windows = any(node.operator.table in _WINDOWS for node in emission.graph.nodes)
    for position, node in enumerate(outputs, start=first):
        if not isinstance(node, fx.Node):
            raise UnsupportedNodeError(
                f"XnnpackBackend cannot return {node!r}: every output must be a tensor"
            )
        first_added = len(emission.sources)
        value = node.meta["val"]
        encoding = None if value.dtype == torch.int8 else _EXTERNAL.get(value.dtype, FLOAT)
        tracked, layout = emission.of(node), layout_of(value)
        if has_windows and _may_have_empty_batch(value.shape, ranges):
            tracked = emission.sized(tracked, layout)
        emission.external_output(tracked, position, layout, encoding)
        emission.sources[first_added:] = [(node,)] * (len(emission.sources) - first_added)


def _may_have_empty_batch(shape: Sequence[Dim], ranges: Mapping[Any, Any]) -> bool:
    """Return whether only the batch size of an image tensor is symbolic, and may be 0."""
    symbols = [axis for axis, size in enumerate(shape) if not is_fixed(size)]
    return len(shape) == 4 and symbols == [0] and size_range(shape[0], ranges)[0] == 0
