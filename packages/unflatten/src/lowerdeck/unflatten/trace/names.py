"""Module names of a program, and detection of shared modules.

Non-strict export keeps every name of parameters and buffers, but not which modules are shared.
Strict export keys each called module by its identity, but keeps one name of a non-persistent
buffer, the last, and the first name of each called module. Both keep one name of a plain tensor.

``ModulePaths`` has the names; ``find_shared_modules`` applies these repairs in order:

- ``_read_calls``: strict, ``self.b = self.a``: calls of one identity are of one module.
- ``_merge_equal_state``: ``a`` and ``b`` of one type, all their tensors the same: one module.
- ``_merge_foreign_callers``: strict, ``b`` calls ``a.fc``, and ``a`` looks like ``b``: one module.
- ``_find_lost_names``: ``b`` reads ``a.scale``, and both are called: ``b.scale`` is a lost name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.unflatten._torch_private import EMPTY_STACK_KEY, TRACER_ROOT
from lowerdeck.unflatten.trace.program import (
    Item,
    ProgramState,
    Role,
    StateEntry,
    StateKind,
    region_arguments,
)


class ModulePaths:
    """Module names of a program, grouped by module.

    Attributes:
        order: All names in eager's order; the root is ``""``.
        merged: Names merged only because of equal state, by the first name.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.order: list[str] = []
        self.merged: dict[str, list[str]] = {}
        self._known: set[str] = set()
        self._first: dict[str, str] = {}
        self._pairs: list[tuple[str, str]] = []
        self._canonical: dict[str, str] = {"": ""}
        for name in names:
            self.add(name)
        self._tracer_root = None if TRACER_ROOT in self._known else TRACER_ROOT

    def add(self, name: str) -> None:
        """Add a name and any missing names of its parents."""
        if name in self._known:
            return
        outer, _, _ = name.rpartition(".")
        if outer:
            self.add(outer)
        elif name and "" not in self._known:
            self.add("")
        self._known.add(name)
        self.order.append(name)

    def eager(self, path: str) -> str:
        """Return eager's name for a module stack path, which may start at the tracer's root."""
        root = self._tracer_root
        if root is None or not path.startswith(root):
            return path
        return "" if path == root else path.removeprefix(root + ".")

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def alias(self, first: str, second: str) -> None:
        """Merge two names of one module; ``first`` becomes canonical."""
        one, two = self.canonical(first), self.canonical(second)
        if one != two:
            self._first[two] = one
            self._canonical = {"": ""}
            self._pairs.append((first, second))

    def settle(self) -> None:
        """Repeat merges that were invalidated by later merges of outer modules."""
        changed = True
        while changed:
            changed = False
            for first, second in list(self._pairs):
                if self.canonical(first) != self.canonical(second):
                    self.alias(first, second)
                    changed = True

    def canonical(self, name: str) -> str:
        """Return the canonical (first) name of a module."""
        result = self._canonical.get(name)
        if result is None:
            outer, dot, last = name.rpartition(".")
            result = self.canonical(outer) + dot + last if dot else name
            while result in self._first:
                result = self._first[result]
            self._canonical[name] = result
        return result

    def under(self, owner: str, name: str) -> str | None:
        """Return the name of module ``name`` relative to ``owner``, or None."""
        prefix = owner + "." if owner else ""
        if name.startswith(prefix) and len(name) > len(prefix):
            return name
        module, start = self.canonical(name), self.canonical(owner)
        if module.startswith(start + ".") and prefix + module[len(start) + 1 :] in self._known:
            return prefix + module[len(start) + 1 :]
        for other in self.order:
            if other.startswith(prefix) and self.canonical(other) == module:
                return other
        return None

    def attribute(self, owner: str, name: str) -> str | None:
        """Return the path from module ``owner`` to state ``name``, or None if it is outside."""
        if not owner:
            return name
        if name.startswith(owner + "."):
            return name[len(owner) + 1 :]
        holder, dot, last = name.rpartition(".")
        if not dot:
            return None
        start, whole = self.canonical(owner), self.canonical(holder)
        if whole == start:
            return last
        return f"{whole[len(start) + 1 :]}.{last}" if whole.startswith(start + ".") else None


def module_names(program: ExportedProgram) -> Iterator[str]:
    """Yield all module names, skipping entries for repeated calls, such as ``layer@1``."""
    names = {entry.fqn for entry in program.module_call_graph}
    for entry in program.module_call_graph:
        base, at, number = entry.fqn.rpartition("@")
        if not (at and number.isdecimal() and base in names):
            yield entry.fqn


_SAVED = (StateKind.PARAMETER, StateKind.BUFFER)


@dataclass(slots=True)
class _Calls:
    """Called modules' data from module stacks, by name.

    Attributes:
        types: The type of each called module.
        identities: Module id, in strict programs.
    """

    types: dict[str, object] = field(default_factory=dict)
    identities: dict[str, str] = field(default_factory=dict)


def find_shared_modules(
    paths: ModulePaths, items: Sequence[Item], state: ProgramState, numbers: Mapping[str, int]
) -> None:
    """Merge the names of shared modules in ``paths``, and add missing names to ``state``.

    Strict module ids and notes of ``export_preserving`` take precedence. Otherwise modules of one
    type whose state is identical are merged: a program cannot distinguish them from one module
    with two names.

    Args:
        state: The program's state; changed.
        numbers: Recorded ids of modules that share all state.
    """
    calls = _read_calls(paths, items)
    is_strict = bool(calls.identities)
    kinds = _SAVED if is_strict else (*_SAVED, StateKind.TRANSIENT_BUFFER)
    first: dict[int, str] = {}
    for path in paths.order if numbers else ():
        if path in numbers:
            paths.alias(first.setdefault(numbers[path], path), path)
    paths.settle()
    if state.has_aliases():
        _merge_equal_state(paths, calls, _state_under(state, kinds), numbers)
        paths.settle()
    if is_strict:
        _merge_foreign_callers(paths, items, state, calls)
    if reads := list(dict.fromkeys(_foreign_reads(paths, items, state))):
        _find_lost_names(reads, paths, state, calls, kinds)
    paths.settle()


def _merge_equal_state(
    paths: ModulePaths,
    calls: _Calls,
    states: Mapping[str, tuple[object, ...]],
    numbers: Mapping[str, int],
) -> None:
    types, identities = calls.types, calls.identities
    by_state: dict[tuple[object, ...], dict[tuple[object, int | None], str]] = {}
    # Called modules come first, as their type is known: a tied Linear and Embedding are two
    # modules, and an uncalled name belongs to one of them.
    position = {path: index for index, path in enumerate(paths.order)}
    for path in sorted(position, key=lambda path: path not in types):
        tensors = states.get(path)
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
            paths.merged.setdefault(other, [other]).append(path)
        paths.alias(*sorted((other, path), key=position.__getitem__))
        if two is not None:
            identities[other] = two


def _merge_foreign_callers(
    paths: ModulePaths, items: Iterable[Item], state: ProgramState, calls: _Calls
) -> None:
    """Merge a caller with the module under whose name its child is called."""
    seen: set[str] = set()
    states: dict[str, tuple[object, ...]] | None = None
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
            states = _state_under(state, _SAVED) if states is None else states
            if _look_alike(caller, outer, _children(paths), states):
                paths.alias(caller, outer)


def _children(paths: ModulePaths) -> dict[str, list[str]]:
    """Return the child names of each module."""
    children: dict[str, list[str]] = {}
    for path in paths.order:
        outer, _, last = path.rpartition(".")
        children.setdefault(outer, []).append(last)
    return children


def _read_calls(paths: ModulePaths, items: Iterable[Item]) -> _Calls:
    calls = _Calls()
    first: dict[str, str] = {}
    seen: set[str] = set()
    for item in items:
        stack = item.node.meta.get("nn_module_stack")
        # The innermost key determines the rest of the stack.
        if not stack or (innermost := next(reversed(stack))) in seen:
            continue
        seen.add(innermost)
        for key, (traced, type_name) in stack.items():
            path = paths.eager(traced) if traced[:1] == "_" else traced
            if not path or key == EMPTY_STACK_KEY:
                continue
            if path not in calls.types:
                calls.types[path] = type_name
                paths.add(path)
            if key[:1].isdecimal() and (identity := key.partition("@")[0]).isdecimal():
                calls.identities[path] = identity
                paths.alias(first.setdefault(identity, path), path)
    return calls


def _state_under(
    state: ProgramState, kinds: Collection[StateKind]
) -> dict[str, tuple[object, ...]]:
    """Return the relative names, kinds and ids of the state under each module."""
    states: dict[str, list[object]] = {}
    for entry in state.entries.values():
        owner = entry.name if entry.kind in kinds else ""
        while "." in owner:
            owner = owner.rpartition(".")[0]
            fact = (entry.name[len(owner) :], entry.kind, entry.identity)
            states.setdefault(owner, []).append(fact)
    return {owner: tuple(facts) for owner, facts in states.items()}


def _find_lost_names(
    reads: Iterable[tuple[str, StateEntry]],
    paths: ModulePaths,
    state: ProgramState,
    calls: _Calls,
    kinds: Collection[StateKind],
) -> None:
    """Restore tensor names that the program dropped in favour of another name.

    A module that reads a tensor of another module of its type owns the tensor too. If that module
    is never called and has the reader's structure, the two are one module.
    """
    types = {paths.canonical(path): name for path, name in calls.types.items()}
    states = _state_under(state, kinds)
    children = _children(paths)
    for reader, entry in reads:
        owner, _, last = entry.name.rpartition(".")
        one, two = paths.canonical(reader), paths.canonical(owner)
        if not owner or one == two or f"{reader}.{last}" in state.entries:
            continue
        if two in types:
            if types[two] == types.get(one):
                state.add_name(f"{reader}.{last}", entry)
        elif calls.identities and _look_alike(reader, owner, children, states):
            paths.alias(*_outermost(reader, owner, children, states, calls))


def _foreign_reads(
    paths: ModulePaths, items: Sequence[Item], state: ProgramState
) -> Iterator[tuple[str, StateEntry]]:
    """Yield each module that reads another module's tensor, with that tensor."""
    wanted = {
        name: state.entries[target]
        for name, target in state.targets.items()
        if target in state.entries
        and state.entries[target].kind not in _SAVED
        and not target.rpartition(".")[2].startswith("lifted_")
    }
    if not wanted:
        return
    operands: dict[Node, Any] = {}
    for item in items:
        if item.role is Role.ENTER and item.inner is not None:
            inner = item.inner.module.graph.find_nodes(op="placeholder")
            for node, operand in zip(inner, region_arguments(item.node)[2], strict=True):
                operands[node] = (
                    operands.get(operand, operand) if isinstance(operand, Node) else None
                )
        if item.role is not Role.COMPUTE:
            continue
        for source in item.node.all_input_nodes:
            read = operands.get(source, source)
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
    states: Mapping[str, tuple[object, ...]],
) -> bool:
    return children.get(one) == children.get(two) and states.get(one) == states.get(two)


def _outermost(
    one: str,
    two: str,
    children: Mapping[str, Sequence[str]],
    states: Mapping[str, tuple[object, ...]],
    calls: _Calls,
) -> tuple[str, str]:
    """Return the outermost shared modules around two shared modules."""
    while True:
        outer, _, last = one.rpartition(".")
        other, _, other_last = two.rpartition(".")
        fits = outer and other and outer != other and last == other_last
        if not fits or other in calls.types or not _look_alike(outer, other, children, states):
            return one, two
        one, two = outer, other
