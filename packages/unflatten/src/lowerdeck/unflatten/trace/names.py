"""Module names of a program, and detection of shared modules.

Non-strict export keeps every name of parameters and buffers, but not which modules are shared.
In strict export, the keys of ``nn_module_stack`` identify the called modules. Both kinds of export
keep only one name of a shared plain tensor; modules that have the tensor under another name read
it under the kept name.

``ModulePaths`` has the names; ``find_shared_modules`` merges those of one module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch.export import ExportedProgram

from lowerdeck.unflatten._torch_private import EMPTY_STACK_KEY, TRACER_ROOT
from lowerdeck.unflatten.trace.program import Item, ProgramState, StateKind


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
        """Merge two names of one module; the canonical name of ``first`` is kept."""
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
        """Return a full name of module ``name`` that starts with ``owner``, or None."""
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
    """Data of called modules, read from module stacks, by name.

    Attributes:
        types: The type of each called module.
        identities: Module id that strict export recorded; empty for other programs.
    """

    types: dict[str, object] = field(default_factory=dict)
    identities: dict[str, str] = field(default_factory=dict)


def find_shared_modules(
    paths: ModulePaths, items: Sequence[Item], state: ProgramState, numbers: Mapping[str, int]
) -> None:
    """Merge the names of shared modules in ``paths``.

    Strict module ids and notes of ``export_preserving`` take precedence. Otherwise modules of one
    type whose state is identical are merged: a program cannot distinguish them from one module
    with two names.

    Args:
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
