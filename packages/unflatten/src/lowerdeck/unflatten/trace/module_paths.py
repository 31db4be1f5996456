"""The names of the program's modules, and which names are one module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.export import ExportedProgram

from lowerdeck.unflatten._torch_private import TRACER_ROOT


class ModulePaths:
    """All module names of a program, grouped by the module that they name.

    Attributes:
        order: Every name in eager's order; the root is ``""``.
        supposed: Names that are taken for one module as these hold the same state, by one of them.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.order: list[str] = []
        self.supposed: dict[str, list[str]] = {}
        self._known: set[str] = set()
        self._first: dict[str, str] = {}
        self._pairs: list[tuple[str, str]] = []
        self._canonical: dict[str, str] = {"": ""}
        for name in names:
            self.add(name)
        self._tracer_root = None if TRACER_ROOT in self._known else TRACER_ROOT

    def add(self, name: str) -> None:
        """Add a name, and those of the modules around it where they are not known yet."""
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
        """Return eager's name for a path of a stack, which may start at the tracer's root."""
        root = self._tracer_root
        if root is None or not path.startswith(root):
            return path
        return "" if path == root else path.removeprefix(root + ".")

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def alias(self, first: str, second: str) -> None:
        """Note that two names are one module; the one that comes first stands for both."""
        one, two = self.canonical(first), self.canonical(second)
        if one != two:
            self._first[two] = one
            self._canonical = {"": ""}
            self._pairs.append((first, second))

    def settle(self) -> None:
        """Note again what became untrue when modules around were noted to be one."""
        changed = True
        while changed:
            changed = False
            for first, second in list(self._pairs):
                if self.canonical(first) != self.canonical(second):
                    self.alias(first, second)
                    changed = True

    def canonical(self, name: str) -> str:
        """Return the first name of the module that ``name`` names."""
        found = self._canonical.get(name)
        if found is None:
            outer, dot, last = name.rpartition(".")
            found = self.canonical(outer) + dot + last if dot else name
            while found in self._first:
                found = self._first[found]
            self._canonical[name] = found
        return found

    def under(self, owner: str, name: str) -> str | None:
        """Return the name of module ``name`` under ``owner``, or None if it has none."""
        prefix = owner + "." if owner else ""
        if name.startswith(prefix) and len(name) > len(prefix):
            return name
        wanted, start = self.canonical(name), self.canonical(owner)
        if wanted.startswith(start + ".") and prefix + wanted[len(start) + 1 :] in self._known:
            return prefix + wanted[len(start) + 1 :]
        for other in self._names_of(wanted):
            if other.startswith(prefix):
                return other
        return None

    def attribute(self, owner: str, name: str) -> str | None:
        """Return the path from module ``owner`` to the state ``name``, or None if outside."""
        if not owner:
            return name
        if name.startswith(owner + "."):
            return name[len(owner) + 1 :]
        held, dot, last = name.rpartition(".")
        if not dot:
            return None
        start, whole = self.canonical(owner), self.canonical(held)
        if whole == start:
            return last
        return f"{whole[len(start) + 1 :]}.{last}" if whole.startswith(start + ".") else None

    def attributes(self, owner: str, names: Iterable[str]) -> list[str]:
        """Return the paths from module ``owner`` by which its code may read state of ``names``."""
        prefix, start = owner + "." if owner else "", self.canonical(owner)
        found: dict[str, None] = {}
        for name in names:
            held, _, last = name.rpartition(".")
            whole = self.canonical(held)
            if whole == start:
                found[last] = None
                continue
            for other in self._names_of(whole):
                if other.startswith(prefix):
                    found[f"{other[len(prefix) :]}.{last}"] = None
        return list(found)

    def _names_of(self, canonical: str) -> list[str]:
        return [name for name in self.order if self.canonical(name) == canonical]


def module_names(program: ExportedProgram) -> Iterator[str]:
    """Yield the names of all modules of a program, without its further calls of preserved ones."""
    names = {entry.fqn for entry in program.module_call_graph}
    is_lowered = any(map(is_delegate, program.graph_module.children()))
    for entry in program.module_call_graph:
        base, at, number = entry.fqn.rpartition("@")
        # A module may be named "n@1" itself.
        may_be_call = at and number.isdecimal() and base in names
        # Lowering takes signatures away, of further calls too.
        is_call = entry.signature is not None or (
            is_lowered and not _is_module(program, entry.fqn)
        )
        if not (may_be_call and is_call):
            yield entry.fqn


def _is_module(program: ExportedProgram, name: str) -> bool:
    """Return whether a node is in a module of this name, or some state is."""
    stacks = (node.meta.get("nn_module_stack") or {} for node in program.graph.nodes)
    return any(key.startswith(name + ".") for key in program.state_dict) or any(
        path == name for stack in stacks for path, _ in stack.values()
    )


def is_delegate(module: object) -> bool:
    """Return whether a graph's child is a delegate, as lowering makes them."""
    return hasattr(module, "backend_id") and hasattr(module, "original_module")
