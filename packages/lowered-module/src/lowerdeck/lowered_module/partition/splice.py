"""Replace the partitions of a program by their delegates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, cast

from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import ExportGraphSignature, InputSpec, OutputSpec
from torch.fx import Graph, Node

from lowerdeck.lowered_module.delegate.module import LoweredBackendModule
from lowerdeck.lowered_module.partition.cut import CutProgram, free_names
from lowerdeck.lowered_module.partition.grouping import strip_tags
from lowerdeck.lowered_module.program.debug_handles import HANDLE
from lowerdeck.lowered_module.program.graphs import (
    STATE_MUTATIONS,
    inputs_of,
    outputs_of,
    value_of,
)
from lowerdeck.lowered_module.program.prepared import MutableStateSnapshot
from lowerdeck.torch_base import (
    LazyGraphModule,
    executorch_call_delegate,
    graphs_of,
    renamed_outputs,
    with_parts,
)


def splice_delegates(
    cut: CutProgram, delegates: Sequence[LoweredBackendModule], copies: MutableStateSnapshot
) -> ExportedProgram:
    """Return the verified program with each partition replaced by a call of its delegate.

    Args:
        cut: The program and its partitions; not usable afterwards.
        delegates: One per partition, in order.
        copies: Copies of the state that any method changes.

    Returns:
        A new program that owns its mutable state; constants are shared with the original.
    """
    program = cut.program
    output_specs = _take_mutations(cut)
    names: dict[int, Iterator[str]] = {}
    for part, delegate in zip(cut.cuts, delegates, strict=True):
        owner, call = part.owner, part.call
        name = next(names.setdefault(id(owner), free_names(owner, "lowered_module")))
        owner.add_module(name, delegate)
        passed = [a for a in call.args if not (isinstance(a, Node) and a.name in part.owned)]
        with owner.graph.inserting_before(call):
            read = owner.graph.get_attr(name)
            new = owner.graph.call_function(executorch_call_delegate, (read, *passed))
        new.meta = {**call.meta, HANDLE: cut.next_handle}
        cut.next_handle += 1
        _take_results(call, new, delegate)
        owner.graph.erase_node(call)
        owner.delete_submodule(str(call.target))
    # Remove all tags, which the next lowering would take for its own partitioner's.
    for tagged in (program, *(delegate.original_module for delegate in delegates)):
        strip_tags(tagged.graph_module)
    # Creating the new program generates the code of the outermost graph.
    for gm in graphs_of(program.graph_module):
        if gm is not program.graph_module:
            gm.recompile()
    owned_names = {name for part in cut.cuts for name in part.owned}
    input_specs: list[InputSpec] = []
    owned: set[str | None] = set()
    for node, spec in inputs_of(program):
        if node.name in owned_names and not node.users:
            owned.add(spec.target)
            program.graph.erase_node(node)
        else:
            input_specs.append(spec)
    still = {spec.target for spec in input_specs}
    state, constants = (
        copies.of(_without(values, owned - still, still))
        for values in (program.state_dict, program.constants)
    )
    signature = ExportGraphSignature(input_specs, output_specs)
    graph_module = LazyGraphModule(program.graph_module, program.graph)
    graph_module.meta.update(program.graph_module.meta)
    # ``ExportedProgram(...)`` would print the guards again.
    spliced = with_parts(
        program,
        graph_module=graph_module,
        graph_signature=renamed_outputs(signature, program.graph),
        state_dict=state,
        range_constraints=dict(program.range_constraints),
        module_call_graph=_call_graph(program.module_call_graph, program.graph.nodes),
        constants=constants,
        verifiers=list(program.verifiers),
    )
    spliced.validate()  # type: ignore[no-untyped-call]
    return spliced


def _take_mutations(cut: CutProgram) -> list[OutputSpec]:
    """Remove mutations that delegates perform from the outputs; return the other output specs."""
    owned = {id(spec) for part in cut.cuts for specs in part.mutated.values() for spec in specs}
    names = {name for part in cut.cuts for name in part.mutated}
    kept = [(value, spec) for value, spec in outputs_of(cut.program) if id(spec) not in owned]
    cut.program.graph.output_node().args = (tuple(value for value, _ in kept),)
    for part in cut.cuts:
        for reader in list(part.call.users):
            if reader.name in names and not reader.users:
                reader.graph.erase_node(reader)
    return [spec for _, spec in kept]


def _take_results(old: Node, new: Node, delegate: LoweredBackendModule) -> None:
    """Replace uses of a partition's results by the delegate's, which include no mutations."""
    outputs = list(outputs_of(delegate.original_module))
    skipped = sum(spec.kind in STATE_MUTATIONS for _, spec in outputs)
    new.meta["val"] = [value_of(value) for value, _ in outputs[skipped:]]
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
    """Return the modules that contain all nodes of ``graph``, outermost first."""
    around: list[tuple[str, Any]] | None = None
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if node.op != "call_function" or not stack:
            continue
        pairs = zip(stack.items() if around is None else around, stack.items(), strict=False)
        around = [frame for frame, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return dict(around or ())


def _without(
    values: Mapping[str, Any], owned: set[str | None], still: set[str | None]
) -> dict[str, Any]:
    """Return ``values`` without owned tensors that are not used otherwise."""
    gone = {id(values[name]) for name in owned if name is not None and name in values}
    return {
        name: value
        for name, value in values.items()
        if name not in owned and (id(value) not in gone or name in still)
    }


def _call_graph(
    entries: Iterable[ModuleCallEntry], nodes: Iterable[Node]
) -> list[ModuleCallEntry]:
    """Return the module call graph, without signatures that name nodes in delegates."""
    names = {None, "", *(node.name for node in nodes)}

    def is_whole(signature: ModuleCallSignature | None) -> bool:
        return signature is not None and all(
            argument.name in names for argument in (*signature.inputs, *signature.outputs)
        )

    return [
        ModuleCallEntry(entry.fqn, entry.signature if is_whole(entry.signature) else None)
        for entry in entries
    ]
