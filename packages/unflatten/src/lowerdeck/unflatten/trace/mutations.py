"""Plan write-backs of new values to state and inputs.

A functional program returns the new values. Generated code writes them in the owning module, as
eager does, but after the last reader of the old value. Earlier calls of a module that updates a
buffer write it too, so that all its calls share code: the second call of a counter reads the
buffer, not a result of the first call. This is sound because only a buffer's final value is
observable.

A counter ``self.n += 1; return x + self.n`` that is called twice, as a functional program::

    add   = b_n + 1        # first call
    out   = x + add
    add_1 = add + 1        # second call reads a value of the first one
    out_1 = out + add_1
    return add_1, out_1    # the new value of the buffer, the result

``all`` has the one write that the program returns: ``add_1``, in the second call.
``_write_before`` adds the write of ``add`` in the first call, and ``through_state`` makes the
second call read the buffer instead of ``add``: both calls become ``n += 1; x + n``.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
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
        through_state: Placeholder to read instead of a value that was already written back, by
            reader index and value.
        final: Placeholder to return for a value that was written back.
        inplace: Whether graphs write; otherwise the new values are leading outputs.
    """

    count: int = 0
    all: list[Mutation] = field(default_factory=list)
    after: dict[int, list[Mutation]] = field(default_factory=dict)
    returned: list[Node] = field(default_factory=list)
    through_state: dict[tuple[int, Node], Node] = field(default_factory=dict)
    final: dict[Node, Node] = field(default_factory=dict)
    inplace: bool = True

    def keep_functional(self) -> None:
        """Return all new values as outputs; the root's code writes them at its end."""
        self.inplace = False
        self.after.clear()
        self.through_state.clear()
        self.final.clear()


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
    arguments = {
        entry.fqn: {spec.name for spec in entry.signature.inputs}
        for entry in program.module_call_graph
        if entry.signature is not None
    }
    _write_between_calls(plan, _Context(items, tree, paths, index, arguments))
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
            views = [user] if returns_view(user.target) else _behind_mark(user, source)
            queue.extend(view for view in views if view not in aliases)
            aliases.update(views)
    return aliases


def _behind_mark(mark: Node, value: Node) -> list[Node]:
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


# Writes in earlier calls.


@dataclass(slots=True)
class _Context:
    items: Sequence[Item]
    tree: CallTree
    paths: ModulePaths
    index: Mapping[Node, int]
    arguments: Mapping[str, Container[str]]

    def frame_of(self, node: Node) -> Frame | None:
        position = self.index.get(node)
        return None if position is None else self.tree.frame_of[self.items[position]]

    def call_around(self, node: Node, like: Frame) -> Frame | None:
        """Return the call around ``node`` of the same module as ``like``, other than ``like``."""
        name = self.paths.canonical(like.path)
        frame = self.frame_of(node)
        for outer in frame.around() if frame is not None else ():
            if self.paths.canonical(outer.path) == name and outer is not like:
                return outer
        return None


def _write_between_calls(plan: Mutations, context: _Context) -> None:
    """Add the writes and reads that pass values between calls through state."""
    calls: dict[str, int] = {}
    for frame in context.tree.frames():
        name = context.paths.canonical(frame.path)
        calls[name] = calls.get(name, 0) + 1
    for mutation in list(plan.all):
        if mutation.frame.parent is None or mutation.clone_value:
            continue
        _read_after(plan, context, mutation, len(context.items))
        plan.final[mutation.value] = mutation.target
        if calls[context.paths.canonical(mutation.frame.path)] > 1:
            _write_before(plan, context, mutation)


def _write_before(plan: Mutations, context: _Context, last: Mutation) -> None:
    """Add writes in earlier calls of the same module, last to first."""
    old_readers = [
        context.index[user]
        for node in _aliases_of(last.target)
        for user in node.users
        if user in context.index
    ]
    later = last
    while True:
        value = _previous_value(context, later)
        frame = context.call_around(value, last.frame) if value is not None else None
        if value is None or frame is None:
            return
        after = _end_of_call(context.items, context.tree, context.index[value], frame)
        if after >= later.after or any(position > after for position in old_readers):
            return
        earlier = Mutation(last.spec, value, last.target, frame, after, False)
        if not _read_after(plan, context, earlier, later.after):
            return
        plan.after.setdefault(after, []).append(earlier)
        later = earlier


def _previous_value(context: _Context, write: Mutation) -> Node | None:
    """Return the value from an earlier call of the same module that ``write`` depends on."""
    layout = _layout(write.target)
    values: set[Node] = set()
    seen, queue = {write.value}, [write.value]
    while queue:
        for source in queue.pop().all_input_nodes:
            caller = context.frame_of(source)
            if source in seen or caller is None:
                continue
            seen.add(source)
            if write.frame in caller.around():
                queue.append(source)
            elif _layout(source) == layout and context.call_around(source, write.frame):
                values.add(source)
    if len(values) > 1:
        # An operator may return several tensors of equal metadata: require the same operator and
        # index.
        values = {value for value in values if _origin(value) == _origin(write.value)}
    return values.pop() if len(values) == 1 else None


def _origin(node: Node) -> object:
    return (node.target, node.args[1:]) if node.target is operator.getitem else node.target


def _read_after(plan: Mutations, context: _Context, write: Mutation, end: int) -> bool:
    """Make readers outside the writing call read state; return whether all can."""
    reads: dict[tuple[int, Node], Node] = {}
    for user in write.value.users:
        position = context.index.get(user)
        if position is None:
            continue
        around = context.tree.frame_of[context.items[position]].around()
        if write.frame in around:
            continue
        if any(write.value.name in context.arguments.get(frame.call_name, ()) for frame in around):
            continue
        views = _aliases_of(user)
        last = max(
            (context.index.get(reader, end) for view in views for reader in view.users),
            default=position,
        )
        # The step before the next write still reads the old value.
        if position <= write.after or position > end or (len(views) > 1 and last > end):
            return False
        reads[position, write.value] = write.target
    plan.through_state.update(reads)
    return True


def _layout(node: Node) -> object:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return (tuple(value.shape), value.dtype, value.device)
