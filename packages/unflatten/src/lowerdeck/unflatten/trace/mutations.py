"""Plan write-backs of new values to state and inputs.

A functional program returns the new values. Generated code writes them in the owning module, as
eager does, but after the last reader of the old value. If one call of a module computes the new
value and a later call of it reads that value, the value is passed between the calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec
from torch.fx import Node

from lowerdeck.torch_base import returns_view
from lowerdeck.unflatten._torch_private import TRACEPOINT
from lowerdeck.unflatten.trace.calls import CallTree, Frame
from lowerdeck.unflatten.trace.names import ModulePaths
from lowerdeck.unflatten.trace.program import Item, ProgramState, Role, unpacks_region

_MUTATIONS = {
    OutputKind.BUFFER_MUTATION,
    OutputKind.PARAMETER_MUTATION,
    OutputKind.USER_INPUT_MUTATION,
}


@dataclass(frozen=True, slots=True, eq=False)
class Mutation:
    """One write-back.

    Attributes:
        value: The node of the new value.
        target: The placeholder that is overwritten.
        frame: The call that writes.
        after: Index of the item to write after; -1 for the start.
        clone_value: Copy the value first, because it aliases an overwritten value.
    """

    spec: OutputSpec
    value: Node
    target: Node
    frame: Frame
    after: int
    clone_value: bool


@dataclass(slots=True)
class Mutations:
    """All write-backs of a program.

    Attributes:
        count: Number of new values before the user's outputs.
        all: The last write of each target.
        after: The writes after each item.
        returned: Outputs that alias a target; copied before the first write.
        inplace: Whether graphs write; otherwise the new values are leading outputs.
    """

    count: int = 0
    all: list[Mutation] = field(default_factory=list)
    after: dict[int, list[Mutation]] = field(default_factory=dict)
    returned: list[Node] = field(default_factory=list)
    inplace: bool = True

    def keep_functional(self) -> None:
        """Make all new values outputs; the code of the root module writes them at its end."""
        self.inplace = False
        self.after.clear()


def plan_mutations(
    program: ExportedProgram,
    items: Sequence[Item],
    tree: CallTree,
    state: ProgramState,
    paths: ModulePaths,
) -> Mutations:
    """Return the write-back plan of ``program``."""
    plan = Mutations()
    outputs: Any = next(iter(program.graph.find_nodes(op="output"))).args[0]
    specs = program.graph_signature.output_specs
    plan.count = sum(spec.kind in _MUTATIONS for spec in specs)
    if not plan.count:
        return plan
    targets = _targets(program)
    writes = [
        (spec, value, targets[spec.kind is OutputKind.USER_INPUT_MUTATION, str(spec.target)])
        for spec, value in zip(specs, outputs, strict=False)
        if spec.kind in _MUTATIONS and isinstance(value, Node)
    ]
    index = _positions(items)
    aliases = {target: _aliases_of(target) for _, _, target in writes}
    overwritten = set().union(*aliases.values())
    returned = (value for value in outputs[plan.count :] if isinstance(value, Node))
    plan.returned = list(dict.fromkeys(value for value in returned if value in overwritten))
    for spec, value, target in writes:
        readers = sorted(
            index[user] for node in aliases[target] for user in node.users if user in index
        )
        computed = index.get(value, -1)
        after = max(computed, readers[-1] if readers else -1)
        frame = _owner(spec, tree, items, computed, state, paths)
        for reader in readers:
            if reader > computed:
                frame = frame.common(tree.frame_of[items[reader]])
        after = _end_of_call(items, tree, after, frame)
        mutation = Mutation(spec, value, target, frame, after, value in overwritten)
        plan.all.append(mutation)
        plan.after.setdefault(after, []).append(mutation)
    return plan


def _positions(items: Sequence[Item]) -> dict[Node, int]:
    """Return the index of the item that computes each node."""
    index = {item.node: position for position, item in enumerate(items)}
    for position, item in enumerate(items):
        if item.role in {Role.EXIT, Role.PASS_OUT} or item.node.target is TRACEPOINT:
            index.update((user, position) for user in item.node.users if unpacks_region(user))
    return index


def _targets(program: ExportedProgram) -> Mapping[tuple[bool, str], Node]:
    """Return the placeholder of each user input (True) and each piece of state, by name."""
    targets: dict[tuple[bool, str], Node] = {}
    by_name = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    for spec in program.graph_signature.input_specs:
        name = str(getattr(spec.arg, "name", ""))
        if name in by_name:
            targets[True, name] = by_name[name]
            if spec.target is not None:
                targets[False, spec.target] = by_name[name]
    return targets


def _owner(
    spec: OutputSpec,
    tree: CallTree,
    items: Sequence[Item],
    computed: int,
    state: ProgramState,
    paths: ModulePaths,
) -> Frame:
    """Return the innermost call around the new value whose module owns the target."""
    if computed < 0 or spec.kind is OutputKind.USER_INPUT_MUTATION:
        return tree.root
    names = state.aliases(str(spec.target))
    for frame in tree.frame_of[items[computed]].around():
        if any(paths.attribute(frame.path, name) is not None for name in names):
            return frame
    return tree.root


def _aliases_of(node: Node) -> set[Node]:
    """Return ``node`` and its possible views."""
    aliases, queue = {node}, [node]
    while queue:
        source = queue.pop()
        for user in source.users:
            views = [user] if returns_view(user.target) else _tracepoint_results(user, source)
            queue.extend(view for view in views if view not in aliases)
            aliases.update(views)
    return aliases


def _tracepoint_results(mark: Node, value: Node) -> list[Node]:
    """Return the nodes that carry ``value`` out of a tracepoint."""
    if mark.target is not TRACEPOINT:
        return []
    return [user for user in mark.users if mark.args[user.args[1]] is value]  # type: ignore[index]


def _end_of_call(items: Sequence[Item], tree: CallTree, after: int, frame: Frame) -> int:
    """Return the last item of the call in ``frame`` that contains item ``after``."""
    if after < 0:
        return after
    child = _child_around(tree.frame_of[items[after]], frame)
    if child is None:
        return after
    while after + 1 < len(items):
        if _child_around(tree.frame_of[items[after + 1]], frame) is not child:
            break
        after += 1
    return after


def _child_around(frame: Frame, ancestor: Frame) -> Frame | None:
    while frame is not ancestor:
        if frame.parent is ancestor or frame.parent is None:
            return frame
        frame = frame.parent
    return None
