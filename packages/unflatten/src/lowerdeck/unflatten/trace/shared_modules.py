"""Which names of a program are one module, and further names of what such modules hold.

Non-strict export keeps every name of parameters and buffers, but does not say which modules are
one. Strict export keys each module that it calls by its identity, but of a buffer that is not
saved it keeps one name, the last, and of modules it calls each by its first name only. Both keep
one name of a plain tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.unflatten._torch_private import EMPTY_STACK_KEY
from lowerdeck.unflatten.calls.carrying import MODULE_NUMBERS, notes_of
from lowerdeck.unflatten.trace.flat_items import Item, Role, mode_arguments
from lowerdeck.unflatten.trace.module_paths import ModulePaths
from lowerdeck.unflatten.trace.state import ProgramState, StateEntry, StateKind

_SAVED = frozenset({StateKind.PARAMETER, StateKind.BUFFER})


@dataclass(slots=True)
class _Calls:
    """What module stacks tell.

    Attributes:
        types: The type of each module that is called, by name.
        identities: Its identity, where export recorded one.
    """

    types: dict[str, object] = field(default_factory=dict)
    identities: dict[str, str] = field(default_factory=dict)


def note_shared_modules(
    paths: ModulePaths, items: Sequence[Item], state: ProgramState, program: ExportedProgram
) -> None:
    """Note in ``paths`` which names are one module, and in ``state`` which names it lacks.

    Identity is proof for and against, and so is what ``export_preserving`` noted. Otherwise two
    names of modules of one type, whose whole state is the same tensors, are taken for one module:
    a program cannot tell a module with two names from two modules that share all their state.

    Args:
        paths: The names; changed.
        items: The program's steps, with their module stacks.
        state: The program's state; changed.
        program: The program.
    """
    calls = _read_calls(paths, items)
    is_strict = bool(calls.identities)
    kinds = _SAVED if is_strict else _SAVED | {StateKind.TRANSIENT_BUFFER}
    numbers = notes_of(program, MODULE_NUMBERS)
    _note_told(paths, numbers)
    # Where every tensor has one name, no two modules have the same ones.
    if state.has_aliases():
        _note_equal_state(paths, calls, _state_under(state, kinds), numbers)
        paths.settle()
    if is_strict:
        _note_foreign_calls(paths, items, state, calls)
    reads = list(dict.fromkeys(_foreign_reads(paths, items, state)))
    if reads:
        _find_lost_names(reads, paths, state, calls, kinds)
    paths.settle()


def _note_told(paths: ModulePaths, numbers: Mapping[str, int]) -> None:
    first: dict[int, str] = {}
    for path in paths.order if numbers else ():
        if path in numbers:
            paths.alias(first.setdefault(numbers[path], path), path)
    paths.settle()


def _note_equal_state(
    paths: ModulePaths,
    calls: _Calls,
    held: Mapping[str, tuple[object, ...]],
    numbers: Mapping[str, int],
) -> None:
    types, identities = calls.types, calls.identities
    by_state: dict[tuple[object, ...], dict[tuple[object, int | None], str]] = {}
    # What is called has a type, and comes first: a tied Linear and Embedding are two modules, and
    # a name that is never called is one of them.
    number = {path: index for index, path in enumerate(paths.order)}
    for path in sorted(number, key=lambda path: path not in types):
        tensors = held.get(path)
        if not tensors:
            continue
        alike = by_state.setdefault(tensors, {})
        kind = types[path] if path in types else next((known for known, _ in alike), None)
        other = alike.setdefault((kind, numbers.get(path)), path)
        if other == path:
            continue
        one, two = identities.get(other), identities.get(path)
        if one is not None and two is not None and one != two:
            continue
        if path not in numbers and (one is None or one != two):
            paths.supposed.setdefault(other, [other]).append(path)
        paths.alias(*sorted((other, path), key=number.__getitem__))
        if two is not None:
            identities[other] = two


def _note_foreign_calls(
    paths: ModulePaths, items: Iterable[Item], state: ProgramState, calls: _Calls
) -> None:
    """Note modules that call a child by its name under another module, which they then are."""
    seen: set[str] = set()
    held: dict[str, tuple[object, ...]] | None = None
    for item in items:
        stack = item.node.meta.get("nn_module_stack")
        if not stack or next(reversed(stack)) in seen:
            continue
        seen.add(next(reversed(stack)))
        names = [paths.eager(traced) for traced, _ in stack.values()]
        for caller, called in pairwise(names):
            if not caller or paths.under(caller, called) is not None:
                continue
            outer, _, last = called.rpartition(".")
            if not outer or outer in calls.types or f"{caller}.{last}" not in paths:
                continue
            held = _state_under(state, _SAVED) if held is None else held
            if _look_alike(caller, outer, _children(paths), held):
                paths.alias(caller, outer)


def _children(paths: ModulePaths) -> dict[str, list[str]]:
    """Return the names of each module's children."""
    found: dict[str, list[str]] = {}
    for path in paths.order:
        outer, _, last = path.rpartition(".")
        found.setdefault(outer, []).append(last)
    return found


def _read_calls(paths: ModulePaths, items: Iterable[Item]) -> _Calls:
    calls = _Calls()
    first: dict[str, str] = {}
    for item in items:
        for key, (traced, type_name) in item.node.meta.get("nn_module_stack", {}).items():
            path = paths.eager(traced)
            if not path or key == EMPTY_STACK_KEY or (path in calls.types and key in first):
                continue
            calls.types.setdefault(path, type_name)
            paths.add(path)
            identity = key.partition("@")[0]
            if identity.isdecimal():
                calls.identities[path] = identity
                paths.alias(first.setdefault(identity, path), path)
    return calls


def _state_under(
    state: ProgramState, kinds: frozenset[StateKind]
) -> dict[str, tuple[object, ...]]:
    """Return, for each module name, relative names, kinds and identities of what is under it."""
    found: dict[str, list[object]] = {}
    for entry in state.entries.values():
        if entry.kind not in kinds:
            continue
        owner = entry.name
        while "." in owner:
            owner = owner.rpartition(".")[0]
            found.setdefault(owner, []).append(
                (entry.name[len(owner) :], entry.kind, entry.identity)
            )
    return {owner: tuple(items) for owner, items in found.items()}


def _find_lost_names(
    reads: Iterable[tuple[str, StateEntry]],
    paths: ModulePaths,
    state: ProgramState,
    calls: _Calls,
    kinds: frozenset[StateKind],
) -> None:
    """Give modules back what they read but what only another name is known of.

    A module that reads what belongs to another one of its type holds it too. Where that other
    name is never called, and its module looks like the reader, the two are one module.
    """
    types = {paths.canonical(path): name for path, name in calls.types.items()}
    held = _state_under(state, kinds)
    children = _children(paths)
    for reader, entry in reads:
        owner, _, last = entry.name.rpartition(".")
        one, two = paths.canonical(reader), paths.canonical(owner)
        if not owner or one == two or f"{reader}.{last}" in state.entries:
            continue
        if two in types:
            if types[two] == types.get(one):
                state.add_name(f"{reader}.{last}", entry)
        elif calls.identities and _look_alike(reader, owner, children, held):
            paths.alias(*_outermost(reader, owner, children, held, calls))


def _foreign_reads(
    paths: ModulePaths, items: Sequence[Item], state: ProgramState
) -> Iterator[tuple[str, StateEntry]]:
    """Yield modules that read a tensor whose names may be incomplete, and the tensor."""
    wanted = {
        name: state.entries[target]
        for name, target in state.targets.items()
        if target in state.entries
        and state.entries[target].kind not in _SAVED
        and not target.rpartition(".")[2].startswith("lifted_")
    }
    if not wanted:
        return
    outside: dict[Node, Any] = {}
    for item in items:
        if item.role is Role.ENTER and item.inner is not None:
            inner = [node for node in item.inner.module.graph.nodes if node.op == "placeholder"]
            for node, operand in zip(inner, mode_arguments(item.node)[2], strict=True):
                outside[node] = (
                    outside.get(operand, operand) if isinstance(operand, Node) else None
                )
        if item.role is not Role.COMPUTE:
            continue
        for source in item.node.all_input_nodes:
            read = outside.get(source, source)
            entry = wanted.get(read.name) if isinstance(read, Node) else None
            stack = item.node.meta.get("nn_module_stack")
            if entry is None or not stack or read.op != "placeholder":
                continue
            reader = paths.eager(next(reversed(stack.values()))[0])
            if reader and not entry.name.startswith(reader + "."):
                yield reader, entry


def _look_alike(
    one: str,
    two: str,
    children: Mapping[str, Sequence[str]],
    held: Mapping[str, tuple[object, ...]],
) -> bool:
    return children.get(one) == children.get(two) and held.get(one) == held.get(two)


def _outermost(
    one: str,
    two: str,
    children: Mapping[str, Sequence[str]],
    held: Mapping[str, tuple[object, ...]],
    calls: _Calls,
) -> tuple[str, str]:
    """Return the outermost modules around two that are one which make them one."""
    while True:
        outer, _, last = one.rpartition(".")
        other, _, other_last = two.rpartition(".")
        fits = outer and other and outer != other and last == other_last
        if not fits or other in calls.types or not _look_alike(outer, other, children, held):
            return one, two
        one, two = outer, other
