"""Put finished delegates into the program in place of the partitions that they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, cast

from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry
from torch.export.graph_signature import ExportGraphSignature, InputSpec, OutputSpec
from torch.fx import Graph, GraphModule, Node

from lowerdeck.lowered_module.delegate import LoweredBackendModule
from lowerdeck.lowered_module.partition.cut import CutProgram
from lowerdeck.lowered_module.partition.grouping import strip_tags
from lowerdeck.lowered_module.program.debug_handles import HANDLE
from lowerdeck.lowered_module.program.graphs import value_of
from lowerdeck.lowered_module.program.prepared import StateCopies
from lowerdeck.lowered_module.program.signature import STATE_MUTATIONS, renamed
from lowerdeck.torch_base import executorch_call_delegate, graphs_of


def splice_delegates(
    cut: CutProgram, delegates: Sequence[LoweredBackendModule], copies: StateCopies
) -> ExportedProgram:
    """Return the program with each partition called through its delegate, verified.

    Args:
        cut: The program and its partitions; used up.
        delegates: One per partition, in order.
        copies: Copies of the state that the program, or another method of it, changes.

    Returns:
        A new program that owns its mutable state; constants are shared with the original.
    """
    kept = _take_mutations(cut)
    names = _FreeNames()
    for part, delegate in zip(cut.cuts, delegates, strict=True):
        name = names.take(part.owner)
        part.owner.add_module(name, delegate)
        owned = set(part.part.owned)
        graph = part.owner.graph
        with graph.inserting_before(part.call):
            read = graph.get_attr(name)
            call = graph.call_function(
                executorch_call_delegate,
                (read, *(arg for arg in part.call.args if _name(arg) not in owned)),
            )
        call.meta = {**part.call.meta, HANDLE: cut.next_handle}
        cut.next_handle += 1
        _take_results(part.call, call, delegate)
        graph.erase_node(part.call)
        part.owner.delete_submodule(str(part.call.target))
    # Tags are one lowering's own: the next would take what is left of them for its partitioner's.
    strip_tags(cut.program.graph_module)
    for delegate in delegates:
        strip_tags(delegate.original_module.graph_module)
    # The outermost graph's code is generated when the new program is made of it.
    for gm in graphs_of(cut.program.graph_module):
        if gm is not cut.program.graph_module:
            gm.recompile()
    return _finish(cut, kept, copies)


def _take_mutations(cut: CutProgram) -> list[tuple[Any, OutputSpec]]:
    """Remove the mutations that moved into delegates from the graph's output; return the rest."""
    taken = {
        id(spec) for part in cut.cuts for specs in part.part.mutated.values() for spec in specs
    }
    names = {name for part in cut.cuts for name in part.part.mutated}
    output = cut.program.graph.output_node()
    specs = cut.program.graph_signature.output_specs
    kept = [
        (value, spec)
        for value, spec in zip(output.args[0], specs, strict=True)
        if id(spec) not in taken
    ]
    output.args = (tuple(value for value, _ in kept),)
    for part in cut.cuts:
        for reader in list(part.call.users):
            if reader.name in names and not reader.users:
                reader.graph.erase_node(reader)
    return kept


class _FreeNames:
    """Hands out attribute names for delegates without trying each number anew."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}

    def take(self, gm: GraphModule) -> str:
        number = self._next.get(id(gm), 0)
        while hasattr(gm, f"lowered_module_{number}"):
            number += 1
        self._next[id(gm)] = number + 1
        return f"lowered_module_{number}"


def _take_results(old: Node, new: Node, delegate: LoweredBackendModule) -> None:
    """Move the readers of a partition's call to its delegate's, which returns no mutations."""
    outputs = delegate.original_module.graph.output_node().args[0]
    specs = delegate.original_module.graph_signature.output_specs
    skipped = sum(spec.kind in STATE_MUTATIONS for spec in specs)
    new.meta["val"] = [value_of(output) for output in outputs[skipped:]]
    stack = _stack_around(delegate.original_module.graph)
    for reader in list(old.users):
        reader.args = (new, cast("int", reader.args[1]) - skipped)
        reader.meta.pop("source_fn_stack", None)
        for node in (new, reader):
            if stack:
                node.meta["nn_module_stack"] = stack
            else:
                node.meta.pop("nn_module_stack", None)


def _stack_around(graph: Graph) -> dict[str, Any]:
    """Return the modules that all nodes of ``graph`` are in, the outermost first."""
    around: list[tuple[str, Any]] | None = None
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if node.op != "call_function" or not stack:
            continue
        pairs = zip(stack.items() if around is None else around, stack.items(), strict=False)
        around = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return dict(around or ())


def _finish(
    cut: CutProgram, kept: Sequence[tuple[Any, OutputSpec]], copies: StateCopies
) -> ExportedProgram:
    program = cut.program
    graph = program.graph
    taken_inputs = {name for part in cut.cuts for name in part.part.owned}
    input_specs: list[InputSpec] = []
    owned_targets: set[str | None] = set()
    placeholders = graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if node.name in taken_inputs and not node.users:
            owned_targets.add(spec.target)
            graph.erase_node(node)
        else:
            input_specs.append(spec)
    signature = ExportGraphSignature(
        input_specs,
        [OutputSpec(spec.kind, renamed(spec.arg, value), spec.target) for value, spec in kept],
    )
    still = {spec.target for spec in input_specs}
    state = _without(program.state_dict, owned_targets - still, still)
    constants = _without(program.constants, owned_targets - still, still)
    return ExportedProgram(
        root=program.graph_module,
        graph=graph,
        graph_signature=signature,
        state_dict=copies.of(state),
        range_constraints=dict(program.range_constraints),
        module_call_graph=_call_graph(program.module_call_graph, graph.nodes),
        example_inputs=program.example_inputs,
        constants=copies.of(constants),
        verifiers=list(program.verifiers),
    )


def _without(
    values: Mapping[str, Any], owned: set[str | None], still: set[str | None]
) -> dict[str, Any]:
    """Return ``values`` less what is owned, under whatever name nobody else knows it by."""
    gone = {id(values[name]) for name in owned if name is not None and name in values}
    return {
        name: value
        for name, value in values.items()
        if name not in owned and (id(value) not in gone or name in still)
    }


def _call_graph(
    entries: Iterable[ModuleCallEntry], nodes: Iterable[Node]
) -> list[ModuleCallEntry]:
    """Return the call graph less the signatures of modules whose nodes went into delegates."""
    names = {node.name for node in nodes}
    return [
        ModuleCallEntry(entry.fqn, entry.signature if _is_whole(entry, names) else None)
        for entry in entries
    ]


def _is_whole(entry: ModuleCallEntry, names: set[str]) -> bool:
    signature = entry.signature
    if signature is None:
        return False
    return all(
        not argument.name or argument.name in names
        for argument in (*signature.inputs, *signature.outputs)
    )


def _name(argument: object) -> str | None:
    return argument.name if isinstance(argument, Node) else None
