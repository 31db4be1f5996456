"""Functionalize a program, and find in-place writes that partitioning would lose.

A delegate takes and returns values: writes to its arguments are lost, and so are writes to a view
that the partition returns. In a functional program only custom operators write in place. A
partition that accesses memory written by such an operator must contain all of its writers, and the
node that creates it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from lowerdeck import decompose
from lowerdeck.lowered_module.errors import AliasingError
from lowerdeck.lowered_module.program.graphs import MUTATIONS, inputs_of, outputs_of
from lowerdeck.lowered_module.program.tags import CHANGED_ELSEWHERE, USED_ELSEWHERE
from lowerdeck.torch_base import (
    Extent,
    MemoryMap,
    MemoryUse,
    graphs_of,
    shared_inputs,
    state_tensors,
    writes_in_place,
)

_OUTSIDE = frozenset({"placeholder", "get_attr"})


def refuse_lost_mutation(
    program: ExportedProgram, gm: GraphModule, tag_of: Mapping[Node, str]
) -> None:
    """Reject partitions that access memory which nodes outside of them write, or the reverse.

    Args:
        gm: The graph module of ``program``, or one nested in it.
        tag_of: Tags of the graph's nodes that are in partitions.

    Raises:
        AliasingError: Delegation of the partitions would lose a write.
    """
    if not writes_in_place(gm):
        return
    inputs = shared_inputs(program) if gm is program.graph_module else ()
    memory = MemoryUse(gm.graph, gm, inputs)
    owners = _owners(gm.graph, memory, tag_of)
    for node, tag in tag_of.items():
        touched = (memory.group(node), *memory.reads(node), *memory.writes(node))
        for group in dict.fromkeys(touched):
            writers = memory.writers(group)
            if not writers or owners[group] == {tag}:
                continue
            writer = next(
                (candidate for candidate in writers if tag_of.get(candidate) != tag), writers[0]
            )
            lost = (
                f"contains {_shown(node)}, which writes memory that other nodes use"
                if writer is node
                else f"contains {_shown(node)}, whose memory {_shown(writer)} writes"
            )
            raise AliasingError(
                f"partition {tag!r} {lost}, but delegates only pass values: leave these nodes "
                "untagged, or replace the in-place write in the model"
            )


def functional(program: ExportedProgram) -> ExportedProgram:
    """Functionalize a program without decomposing its operators.

    Args:
        program: Any program; not changed, and returned itself if nothing is written in place.

    Raises:
        AliasingError: torch cannot functionalize a write.
    """
    if not any(map(writes_in_place, graphs_of(program.graph_module))):
        return program
    try:
        return decompose.functionalize(program)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        if not isinstance(error, decompose.DecomposeError):
            reason = f"torch cannot make the program functional ({type(error).__name__}: {reason})"
        raise AliasingError(
            f"the program writes in place, but a delegate passes values only, and {reason}. Write "
            "the model without the in-place write"
        ) from error


def changing_inputs(program: ExportedProgram) -> set[Node]:
    """Return the placeholders whose memory a call of ``program`` changes.

    Changes are in-place writes, also to views, and mutations in the signature. Placeholders that
    overlap such memory, or that another method changes, are included.
    """
    inputs = list(inputs_of(program))
    targets = {spec.target for _, spec in outputs_of(program) if spec.kind in MUTATIONS}
    elsewhere = {node for node, _ in inputs if CHANGED_ELSEWHERE in node.meta}
    if not targets and not writes_in_place(program.graph_module):
        # Most programs and nearly all partitions change nothing: skip the alias analysis.
        return elsewhere
    memory = MemoryUse.of_program(program)
    mutated = {
        memory.group(node) for node, spec in inputs if (spec.target or node.name) in targets
    }
    return {
        node
        for node, _ in inputs
        if memory.group(node) in mutated or memory.writers(node) or node in elsewhere
    }


def changed_memory(programs: Iterable[ExportedProgram]) -> MemoryMap:
    """Return the memory that a call of any of ``programs`` changes."""
    extents: list[Extent] = []
    for program in programs:
        state = state_tensors(program)
        changing = changing_inputs(program)
        extents += [Extent.of(state[node]) for node in changing if node in state]
    return MemoryMap(extents)


def used_memory(programs: Iterable[ExportedProgram]) -> MemoryMap:
    """Return the memory of the parameters, buffers and constants that ``programs`` use."""
    return MemoryMap(
        Extent.of(tensor)
        for program in programs
        for node, tensor in state_tensors(program).items()
        if node.users
    )


def mark_shared(
    program: ExportedProgram, source: ExportedProgram, changed: MemoryMap, used: MemoryMap
) -> None:
    """Mark, in place, the placeholders of ``program`` whose memory other methods use.

    Args:
        program: A copy for a partitioner.
        source: The program that it was copied from, with the tensors.
        changed: Memory that any method changes (``changed_memory``).
        used: Memory that other methods use (``used_memory``).
    """
    state = state_tensors(source)
    for (copied, _), (node, _) in zip(inputs_of(program), inputs_of(source), strict=True):
        if node not in state:
            continue
        extent = Extent.of(state[node])
        if changed.find(extent) is not None:
            copied.meta[CHANGED_ELSEWHERE] = True
        if used.find(extent) is not None:
            copied.meta[USED_ELSEWHERE] = True


def _owners(
    graph: Graph, memory: MemoryUse, tag_of: Mapping[Node, str]
) -> dict[Node, set[str | None]]:
    """Return the tags of the producer and the writers of each memory that is written."""
    owners: dict[Node, set[str | None]] = {}
    for node in graph.nodes:
        # The value before the call has no producer, even if a partition owns its memory.
        tag = None if node.op in _OUTSIDE else tag_of.get(node)
        group = memory.group(node)
        makes = node.op in _OUTSIDE or group not in map(memory.group, node.all_input_nodes)
        if makes and memory.writers(group):
            owners.setdefault(group, set()).add(tag)
        for written in memory.writes(node):
            owners.setdefault(written, set()).add(tag)
    return owners


def _shown(node: Node) -> str:
    return f"{node.name!r} ({node.target})"
