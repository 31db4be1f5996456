"""Plan where the new values of mutated buffers and inputs are written back.

A functional program returns the new values. Eager wrote them in the module that owns the buffer,
so the generated code does too, but never before the last reader of the old value has run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec
from torch.fx import Node

from lowerdeck.unflatten._torch_private import TRACEPOINT
from lowerdeck.unflatten.trace.call_tree import CallTree, Frame, common_ancestor
from lowerdeck.unflatten.trace.flat_items import Item, Role, unpacks
from lowerdeck.unflatten.trace.module_paths import ModulePaths
from lowerdeck.unflatten.trace.mutations import Mutation, Mutations, aliases_of, end_of_call
from lowerdeck.unflatten.trace.state import ProgramState
from lowerdeck.unflatten.trace.state_between_calls import carry_through_state

_MUTATIONS = {
    OutputKind.BUFFER_MUTATION,
    OutputKind.PARAMETER_MUTATION,
    OutputKind.USER_INPUT_MUTATION,
}


def plan_mutations(
    program: ExportedProgram,
    items: Sequence[Item],
    tree: CallTree,
    state: ProgramState,
    paths: ModulePaths,
) -> Mutations:
    """Return where each new value is written.

    Args:
        program: The program.
        items: Its steps.
        tree: The calls around them.
        state: Its state.
        paths: Its modules.
    """
    plan = Mutations()
    outputs: Any = next(iter(program.graph.find_nodes(op="output"))).args[0]
    specs = program.graph_signature.output_specs
    plan.count = sum(spec.kind in _MUTATIONS for spec in specs)
    if not plan.count:
        return plan
    targets = _targets(program)
    found = [
        (spec, value, targets[spec.kind is OutputKind.USER_INPUT_MUTATION, str(spec.target)])
        for spec, value in zip(specs, outputs, strict=False)
        if spec.kind in _MUTATIONS and isinstance(value, Node)
    ]
    index = _positions(items)
    aliases = {target: aliases_of(target) for _, _, target in found}
    overwritten = set().union(*aliases.values())
    returned = (value for value in outputs[plan.count :] if isinstance(value, Node))
    plan.returned = list(dict.fromkeys(value for value in returned if value in overwritten))
    for spec, value, target in found:
        readers = sorted(
            index[user] for node in aliases[target] for user in node.users if user in index
        )
        made = index.get(value, -1)
        after = max(made, readers[-1] if readers else -1)
        frame = _owner(spec, tree, items, made, state, paths)
        for reader in readers:
            if reader > made:
                frame = common_ancestor(frame, tree.frame_of[items[reader]])
        after = end_of_call(items, tree, after, frame)
        mutation = Mutation(spec, value, target, frame, after, value in overwritten)
        plan.all.append(mutation)
        plan.after.setdefault(after, []).append(mutation)
    given = {
        entry.fqn: {spec.name for spec in entry.signature.inputs}
        for entry in program.module_call_graph
        if entry.signature is not None
    }
    carry_through_state(plan, items, tree, paths, index, given)
    return plan


def _positions(items: Sequence[Item]) -> dict[Node, int]:
    """Return the index of the item after which each node has its value."""
    index = {item.node: position for position, item in enumerate(items)}
    for position, item in enumerate(items):
        if item.role in {Role.EXIT, Role.PASS_OUT} or item.node.target is TRACEPOINT:
            index.update((user, position) for user in item.node.users if unpacks(user))
    return index


def _targets(program: ExportedProgram) -> Mapping[tuple[bool, str], Node]:
    """Return the placeholder of each piece of state and of each user input, by its name."""
    found: dict[tuple[bool, str], Node] = {}
    by_name = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    for spec in program.graph_signature.input_specs:
        name = str(getattr(spec.arg, "name", ""))
        if name in by_name:
            found[True, name] = by_name[name]
            if spec.target is not None:
                found[False, spec.target] = by_name[name]
    return found


def _owner(
    spec: OutputSpec,
    tree: CallTree,
    items: Sequence[Item],
    made: int,
    state: ProgramState,
    paths: ModulePaths,
) -> Frame:
    """Return the innermost call around the new value whose module owns what is overwritten."""
    if made < 0 or spec.kind is OutputKind.USER_INPUT_MUTATION:
        return tree.root
    frame: Frame | None = tree.frame_of[items[made]]
    names = state.aliases(str(spec.target))
    while frame is not None:
        if any(paths.attribute(frame.path, name) is not None for name in names):
            return frame
        frame = frame.parent
    return tree.root
