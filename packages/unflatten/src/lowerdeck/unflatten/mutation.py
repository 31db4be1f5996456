"""Where the new values of mutated buffers and inputs are written back.

A functional program returns the new values. Eager wrote them in the module that owns the buffer,
so the
generated code does too, but never before the last reader of the old value has run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec
from torch.fx import Node

from lowerdeck.unflatten.call_tree import CallTree, Frame, common_ancestor
from lowerdeck.unflatten.flat_items import Item
from lowerdeck.unflatten.module_paths import ModulePaths
from lowerdeck.unflatten.state import ProgramState

_MUTATIONS = {
    OutputKind.BUFFER_MUTATION,
    OutputKind.PARAMETER_MUTATION,
    OutputKind.USER_INPUT_MUTATION,
}


@dataclass(frozen=True, slots=True, eq=False)
class Mutation:
    """One value to be written back.

    Attributes:
        spec: What the program says about it.
        value: The node that carries the new value.
        target: The placeholder that is overwritten.
        frame: The call that writes.
        after: Index of the item after which it writes; -1 for the start.
        clone_value: The value shares memory with something overwritten too: take a copy first.
    """

    spec: OutputSpec
    value: Node
    target: Node
    frame: Frame
    after: int
    clone_value: bool


@dataclass(slots=True)
class Mutations:
    """All of them.

    Attributes:
        specs: What stands before the user's outputs in the program's output.
        after: The mutations to be written after each item.
        returned: Outputs that would show the new value of something overwritten: copy them before.
    """

    count: int = 0
    all: list[Mutation] = field(default_factory=list)
    after: dict[int, list[Mutation]] = field(default_factory=dict)
    returned: set[Node] = field(default_factory=set)


def is_view(target: object) -> bool:
    """Return whether an operator may return a view of an argument that it does not write."""
    return isinstance(target, OpOverload) and any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in target._schema.returns
    )


def is_inplace(target: object) -> bool:
    """Return whether an operator writes its first argument and returns it."""
    if not isinstance(target, OpOverload):
        return False
    schema = target._schema
    return (
        len(schema.returns) == 1
        and schema.returns[0].alias_info is not None
        and schema.returns[0].alias_info.is_write
        and bool(schema.arguments)
        and schema.arguments[0].alias_info is not None
        and schema.arguments[0].alias_info.is_write
    )


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
    index = {item.node: place for place, item in enumerate(items)}
    aliases = {target: _aliases(target) for _, _, target in found}
    overwritten = set().union(*aliases.values())
    returned = (value for value in outputs[plan.count :] if isinstance(value, Node))
    plan.returned = {value for value in returned if value in overwritten}
    for spec, value, target in found:
        readers = sorted(
            index[user] for node in aliases[target] for user in node.users if user in index
        )
        made = index.get(value, -1)
        after = max(made, readers[-1] if readers else -1)
        frame = _owner(spec, tree, items, made, state, paths)
        for place in readers:
            if place > made:
                frame = common_ancestor(frame, tree.home[items[place]])
        after = _end_of_call(items, tree, after, frame)
        mutation = Mutation(spec, value, target, frame, after, value in overwritten)
        plan.all.append(mutation)
        plan.after.setdefault(after, []).append(mutation)
    return plan


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


def _aliases(node: Node) -> set[Node]:
    """Return ``node`` and everything that may be a view of it."""
    found, queue = {node}, [node]
    while queue:
        for user in queue.pop().users:
            if user not in found and is_view(user.target):
                found.add(user)
                queue.append(user)
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
    frame: Frame | None = tree.home[items[made]]
    names = state.aliases(str(spec.target))
    while frame is not None:
        if any(paths.attribute(frame.path, name) is not None for name in names):
            return frame
        frame = frame.parent
    return tree.root


def _end_of_call(items: Sequence[Item], tree: CallTree, after: int, frame: Frame) -> int:
    """Return the last item of the call, made by ``frame``, that item ``after`` stands in."""
    if after < 0:
        return after
    child = _child_of(tree.home[items[after]], frame)
    if child is None:
        return after
    while after + 1 < len(items) and _child_of(tree.home[items[after + 1]], frame) is child:
        after += 1
    return after


def _child_of(frame: Frame, ancestor: Frame) -> Frame | None:
    while frame is not ancestor:
        if frame.parent is ancestor or frame.parent is None:
            return frame
        frame = frame.parent
    return None


def functional_values(outputs: Any, count: int) -> tuple[Any, ...]:
    """Return what the program returns to its user."""
    return tuple(outputs)[count:]
