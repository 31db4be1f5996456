"""The half of the XNNPACK backend that works ahead of time."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import fx
from torch.export import ExportedProgram

from lowerdeck.lowered_module import (
    BackendDetails,
    CompileSpec,
    DelegateMappingBuilder,
    PreprocessResult,
    constant_tensors,
)
from lowerdeck.torch_base import arguments_of, describe_node
from lowerdeck.xnnpack.emit.arguments import Call, shape_of
from lowerdeck.xnnpack.emit.emission import Emission, Tracked
from lowerdeck.xnnpack.errors import UnsupportedNodeError
from lowerdeck.xnnpack.operators.table import OPERATORS, SUPPORTED, refusal
from lowerdeck.xnnpack.payload.encode import encode
from lowerdeck.xnnpack.payload.layout import layout_of

SIZES = (int, torch.SymInt)


class XnnpackBackend(BackendDetails):
    """Compiles float32 partitions to what the official runtime's XNNPACK delegate executes.

    Weights go into the file's named data under the hash of their bytes, so that equal weights are
    stored once; batch norms are folded into the convolution or linear layer before them, and
    clamps into the node before them.
    """

    version = "1"
    supported_operators: ClassVar[tuple[str, ...]] = SUPPORTED

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram,
        compile_specs: list[CompileSpec],  # noqa: ARG004  (the runtime reads none)
    ) -> PreprocessResult:
        """Return the payload of one partition, its debug map, and its weights as named data.

        Args:
            edge_program: The partition, in training or in core ATen form.
            compile_specs: Not needed.

        Returns:
            The result; the debug identifiers are the numbers of the payload's nodes.

        Raises:
            UnsupportedNodeError: XNNPACK cannot compute a node, or would compute it wrongly.
        """
        emission = emit_partition(edge_program)
        debug_map = DelegateMappingBuilder()
        for number, nodes in enumerate(emission.sources):
            if any("debug_handle" in node.meta for node in nodes):
                debug_map.insert_delegate_mapping_entry(nodes, identifier=number)
        return PreprocessResult(
            processed_bytes=encode(emission.graph),
            debug_handle_map=debug_map.get_delegate_mapping(),
            data_store_output=emission.named_data.get_named_data_store_output(),
        )


def emit_partition(program: ExportedProgram) -> Emission:
    """Return the payload of one partition before it is serialised.

    Args:
        program: The partition as a program of its own.

    Returns:
        The graph, its constants, and where its nodes came from.

    Raises:
        UnsupportedNodeError: XNNPACK cannot compute a node, or would compute it wrongly.
    """
    emission = Emission()
    constants = constant_tensors(program)
    given = set(program.graph_signature.user_inputs)
    inputs = [one for one in program.graph.find_nodes(op="placeholder") if one.name in given]
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in constants:
            tensor = constants[node.name]
            emission.define(node, Tracked(tuple(tensor.shape), tensor))
    for position, node in enumerate(inputs):
        # Positions of arguments that are no tensors, such as sizes, have no value.
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            layout = layout_of(value)
            emission.define(node, emission.external_input(shape_of(node), position, layout))
    absorbed: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "call_function" and not (node in emission or node in absorbed):
            if node.target is operator.getitem or isinstance(node.meta.get("val"), SIZES):
                continue  # defined with what it reads from; sizes are read off at run time
            first = len(emission.sources)
            _emit_node(emission, node, constants)
            chain = _chain(emission, node)
            absorbed.update(chain)
            emission.sources[first:] = [tuple(chain)] * (len(emission.sources) - first)
    outputs = program.graph.output_node().args[0]
    _emit_outputs(emission, outputs, first=len(inputs))
    emission.graph.num_externs = len(inputs) + len(outputs)
    return emission


def _emit_node(emission: Emission, node: fx.Node, constants: dict[str, torch.Tensor]) -> None:
    reason = refusal(node, constants)
    if reason is not None:
        raise UnsupportedNodeError(
            f"XnnpackBackend cannot compile {describe_node(node)}: {reason}; leave it untagged"
        )
    known = [emission.of(one).tensor for one in node.all_input_nodes if one in emission]
    if None not in known and len(known) == len(node.all_input_nodes):
        _fold(emission, node)
        return
    OPERATORS[node.target].emit(emission, Call(node, arguments_of(node), constants))


def _chain(emission: Emission, node: fx.Node) -> list[fx.Node]:
    """Return a node, with those after it that it absorbed, up to one that has a value."""
    chain = [node]
    while chain[-1] not in emission and len(chain[-1].users) == 1:
        chain.append(next(iter(chain[-1].users)))
    return chain


def _fold(emission: Emission, node: fx.Node) -> None:
    """Compute ahead of time what depends on constants alone."""

    def data(one: fx.Node) -> torch.Tensor:
        return emission.constant(one)

    args, kwargs = fx.map_arg((node.args, node.kwargs), data)
    with torch.no_grad():
        result = node.target(*args, **kwargs)  # type: ignore[operator]  # a call_function
    if isinstance(result, torch.Tensor):
        emission.define(node, Tracked(tuple(result.shape), result))
        return
    for user in node.users:
        piece = result[user.args[1]]
        emission.define(user, Tracked(tuple(piece.shape), piece))


def _emit_outputs(emission: Emission, outputs: Sequence[fx.Node | None], *, first: int) -> None:
    for position, node in enumerate(outputs, start=first):
        if not isinstance(node, fx.Node):
            raise UnsupportedNodeError(
                f"XnnpackBackend cannot return {node!r}: every output must be a tensor"
            )
        first_added = len(emission.sources)
        emission.external_output(emission.of(node), position, layout_of(node.meta["val"]))
        emission.sources[first_added:] = [(node,)] * (len(emission.sources) - first_added)
