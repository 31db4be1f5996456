"""Merge placeholders that alias one mutated tensor."""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind
from torch.fx import Node

from lowerdeck.torch_base import Extent, MemoryUse, copy_graph_module, state_tensors, with_parts


def merge_written_names(program: ExportedProgram, memory: MemoryUse) -> ExportedProgram:
    """Return ``program`` with one placeholder per mutated tensor.

    Language-model caches also reference their buffers in plain objects, which ``torch.export``
    lifts as constants. Functionalization would write one input and read the other.

    Args:
        program: Any program; not changed, and returned itself if no mutated tensor has two names.
        memory: Memory use of the program.
    """
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    written = [item for item in state_tensors(program).items() if memory.writers(item[0])]
    # Buffers first: signatures cannot express mutations of constants.
    written.sort(key=lambda item: kinds[item[0].name] is InputKind.CONSTANT_TENSOR)
    first: dict[object, Node] = {}
    merged: dict[str, str] = {}
    for node, tensor in written:
        # Tensors that overlap differently are rejected later.
        place = (Extent.of(tensor), tensor.dtype, tensor.shape, tensor.stride())
        kept_node = first.setdefault(place, node)
        if kept_node is not node and node.users:
            merged[node.name] = kept_node.name
    if not merged:
        return program
    # Placeholders precede all calls, so either can replace the other.
    copied = copy_graph_module(program.graph_module)
    placeholders = {node.name: node for node in copied.graph.find_nodes(op="placeholder")}
    for name, kept_name in merged.items():
        placeholders[name].replace_all_uses_with(placeholders[kept_name])
        copied.graph.erase_node(placeholders[name])
    signature = program.graph_signature
    inputs = [spec for spec in signature.input_specs if spec.arg.name not in merged]
    outputs = list(signature.output_specs)
    new_signature = ExportGraphSignature(inputs, outputs)
    return with_parts(program, graph_module=copied, graph_signature=new_signature)
