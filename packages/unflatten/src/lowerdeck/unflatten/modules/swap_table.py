"""Which modules of an unflattened program can be replaced and called alone, and why others not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch.fx import Graph

from lowerdeck.torch_base import is_getitem
from lowerdeck.unflatten._torch_private import children_of
from lowerdeck.unflatten.calls.carrying import (
    CARRIES,
    IN_PARTS,
    LOST_PART,
    PRIVATE,
    UNKNOWN_CALL,
    must_be_twins,
    must_hand_through,
    read_by_others,
    reads_of_others,
)
from lowerdeck.unflatten.calls.former_calls import FORMER
from lowerdeck.unflatten.calls.python_names import on_one_line
from lowerdeck.unflatten.calls.recorded_calls import twins_of, untold_forms
from lowerdeck.unflatten.code import split_call_target
from lowerdeck.unflatten.modules.container import Container
from lowerdeck.unflatten.modules.generated_module import Body, GeneratedModule
from lowerdeck.unflatten.modules.replacing import Holder
from lowerdeck.unflatten.results import GIVEN_BACK

NOT_REPLACEABLE = "lowerdeck_not_replaceable"
"""Where the meta of the outermost module has those in whose place no other one would be right."""

SUPPOSED_ONE = "lowerdeck_supposed_one"
"""Where the meta of the outermost module has the names that are taken for one module."""

_FLAT = "takes and returns flat values: the program does not tell its signature"
_PRESERVE = "export the model with export_preserving"
_LOSES_WRITES = (
    "called alone it would not change its argument in place, as eager's does: decomposing made a "
    "new value of that write. Unflatten the program before run_decompositions() to do that"
)
_UNTOLD = (
    "take such arguments that these do not tell which is meant: called alone with them it is "
    "refused; call one form, call_modules()[number] of the module"
)
_ONE = (
    "hold the same tensors, for which they are taken for one module: what changes one changes all "
    "of them; export_preserving tells them apart"
)
_NOWHERE = "is called nowhere in this program, so that nothing in its place is called either"
_HOLDS = "is not called itself: those who call what it holds call what another module there holds"
_SAME = "what it is given or holds, as the one recorded did, for others read that afterwards too"
_READ_THERE = "which the code that calls it reads or writes there"


@dataclass(frozen=True, slots=True)
class Swap:
    """What can be done with one module.

    Attributes:
        path: Its name.
        replaceable: Whether an eager module of the same signature may be put in its place.
        callable_alone: Whether it computes everything from its arguments and its own state, and
            does to its arguments what eager's does, and whether its arguments tell which form is
            meant of a module of several.
        reason: Why one of these is not so, and what another module must hold because other
            modules read or write it there; "" where there is nothing to say.
        called: Whether the program has a call of it. It has none of what only holds others, such
            as a list of layers, and of what nobody calls.
    """

    path: str
    replaceable: bool
    callable_alone: bool
    reason: str = ""
    called: bool = True


@dataclass(frozen=True, slots=True)
class SwapTable(Sequence[Swap]):
    """A row for each module of the program, outer ones first; prints as a table.

    What only holds others, such as a list of layers, can be replaced where these can.

    Attributes:
        rows: The rows.
    """

    rows: tuple[Swap, ...]

    @overload
    def __getitem__(self, index: int) -> Swap: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Swap, ...]: ...

    def __getitem__(self, index: int | slice) -> Swap | tuple[Swap, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        width = max((len(on_one_line(row.path)) for row in self.rows), default=0)
        return "\n".join(
            f"{on_one_line(row.path):<{width}}  {_mark(row.replaceable, 'replace')}  "
            f"{_mark(row.callable_alone, 'call')}  {on_one_line(row.reason)}".rstrip()
            for row in self.rows
        )


def _mark(can: bool, what: str) -> str:
    return what if can else "-" * len(what)


def swap_table(root: torch.nn.Module, meta: Mapping[str, Any]) -> SwapTable:
    """Return what can be done with each module under ``root``.

    Args:
        root: The outermost module.
        meta: Its metadata, which has the modules that are known not to be replaceable.
    """
    first: dict[torch.nn.Module, str] = {}
    forbidden: dict[str, str] = dict(meta.get(NOT_REPLACEABLE, {}))
    for path, module in root.named_modules(remove_duplicate=False):
        # A row has the first name, and a call may be made by any.
        if first.setdefault(module, path) != path and path in forbidden:
            forbidden.setdefault(first[module], forbidden[path])
    rows = {row.path: row for row in _rows(root, forbidden, meta.get(SUPPOSED_ONE, {}))}
    _add_holders(root, rows)
    return SwapTable(tuple(rows[path] for path, _ in root.named_modules() if path))


def _add_holders(root: torch.nn.Module, rows: dict[str, Swap]) -> None:
    """Add a row for each module that is not called; those of all others are there."""
    paths = {module: path for path, module in root.named_modules()}
    for module, path in reversed(paths.items()):
        if not path or path in rows:
            continue
        children = [child for child in children_of(module).values() if child is not None]
        if not children:
            rows[path] = Swap(path, True, callable_alone=False, reason=_NOWHERE, called=False)
            continue
        # A module has the row of its first name, and may hold itself.
        held = [rows[paths[child]] for child in children if paths[child] in rows]
        stuck = [repr(row.path) for row in held if not row.replaceable]
        reason = f"holds {stuck[0]}, which cannot be replaced" if stuck else _HOLDS
        rows[path] = Swap(path, not stuck, callable_alone=False, reason=reason, called=False)


def _rows(
    root: torch.nn.Module, forbidden: Mapping[str, str], supposed: Mapping[str, Sequence[str]]
) -> Iterator[Swap]:
    wanted, returned, twice = _read_by_callers(root), _handed_through(root), _returned_twice(root)
    handed_out = _handed_out(root)
    for path, module in root.named_modules():
        if path in forbidden and not isinstance(module, GeneratedModule):
            is_called = not isinstance(module, Container)
            yield Swap(path, False, is_called, forbidden[path], called=is_called)
            continue
        # What was there tells how it is called. Not by its truth: eager's type may have a length.
        former = _former(root, path)
        held = module if former is None else former
        if getattr(held, "_lowerdeck_uncalled", False):
            is_alone = not isinstance(module, Container)
            yield Swap(path, False, is_alone, UNKNOWN_CALL, called=False)
            continue
        if not path or (isinstance(held, Holder) and PRIVATE not in held.__dict__):
            continue
        if not isinstance(held, GeneratedModule):
            yield Swap(path, replaceable=True, callable_alone=True)
            continue
        body: Body = held.__dict__[PRIVATE]
        bodies = (body, *body.others)
        why = forbidden.get(path)
        alone = why if why is not None and LOST_PART in why else _not_alone(bodies)
        reasons = [*_not_replaceable(bodies, why), *((alone,) if alone else ())]
        replaceable = len(reasons) == bool(alone)
        if replaceable and path in wanted:
            names = ", ".join(map(repr, wanted[path]))
            reasons.append(f"another module in its place must hold {names} too, {_READ_THERE}")
        if replaceable and path in returned:
            wheres = " and as ".join(returned[path])
            reasons.append(f"another module in its place must return as {wheres} {_SAME}")
        if path in supposed:
            names = ", ".join(map(repr, supposed[path]))
            reasons.append(f"{names} {_ONE}")
        reasons += twins_of(bodies)
        reasons += [
            f"another module in its place must return one tensor as {places}"
            for places in twice.get(path, ())
        ]
        reasons += [
            f"{outer!r} hands its result out too, beside its own: one value here, so that a "
            "change is in both"
            for outer in handed_out.get(path, ())
        ]
        told = "; ".join(dict.fromkeys(reasons))
        yield Swap(path, replaceable, alone is None, told)


def _former(root: torch.nn.Module, path: str) -> torch.nn.Module | None:
    """Return what was where there is another module now, if that told how it was called."""
    outer, _, name = path.rpartition(".")
    former: dict[str, torch.nn.Module] = root.get_submodule(outer).__dict__.get(FORMER, {})
    return former.get(name)


def _read_by_callers(root: torch.nn.Module) -> dict[str, list[str]]:
    """Return for each module what others read or write of what it holds, by its path."""
    found: dict[str, dict[str, None]] = {}
    modules = dict(root.named_modules())
    for path, graph in _graphs(root):
        for node in graph.find_nodes(op="get_attr"):
            outer, _, name = str(node.target).rpartition(".")
            held = f"{path}.{outer}" if path else outer
            if outer and held in modules and name not in children_of(modules[held]):
                found.setdefault(held, {})[name] = None
    return {path: list(names) for path, names in found.items()}


def _handed_through(root: torch.nn.Module) -> dict[str, list[str]]:
    """Return for each module which of its results must be what it is given, by its path."""
    found: dict[str, dict[str, None]] = {}
    for path, graph in _graphs(root):
        checks = graph.find_nodes(op="call_function", target=must_hand_through)
        results = [(node.args[0], str(node.args[3])) for node in checks]
        results += [
            (node, node.meta[GIVEN_BACK][1])
            for node in graph.nodes
            if GIVEN_BACK in node.meta and node.users
        ]
        for result, where in results:
            call: Any = result
            while call.op != "call_module":
                call = call.args[0]
            name, _ = split_call_target(str(call.target))
            found.setdefault(f"{path}.{name}" if path else name, {})[where] = None
    return {path: list(wheres) for path, wheres in found.items()}


def _returned_twice(root: torch.nn.Module) -> dict[str, list[str]]:
    """Return for each module which of its results must be one tensor, by its path."""
    found: dict[str, dict[str, None]] = {}
    for path, graph in _graphs(root):
        for node in graph.find_nodes(op="call_function", target=must_be_twins):
            wheres: Any = node.args[3]
            name, _ = split_call_target(str(node.args[2]))
            owner = f"{path}.{name}" if path else name
            found.setdefault(owner, {})[" and as ".join(wheres)] = None
    return {path: list(places) for path, places in found.items()}


def _handed_out(root: torch.nn.Module) -> dict[str, dict[str, None]]:
    """Return for each module who hands its results to others beside its own, by its path."""
    found: dict[str, dict[str, None]] = {}
    for path, module in root.named_modules():
        body: Body | None = module.__dict__.get(PRIVATE)
        for form in (body, *body.others) if body is not None else ():
            carries = form.signature.carries if form.signature is not None else 0
            output: Any = next(iter(form.graph.find_nodes(op="output"))) if carries else None
            for node in output.args[0][-carries:] if carries else ():
                call, taken = node, None
                while call.op == "call_function" and is_getitem(call):
                    call, taken = call.args[0], call.args[1]
                # The second of a pair is no result: whoever computes it has the row.
                if call.op == "call_module" and not (call.meta.get(CARRIES) and taken == 1):
                    name, _ = split_call_target(str(call.target))
                    found.setdefault(f"{path}.{name}" if path else name, {})[path] = None
    return found


def _graphs(root: torch.nn.Module) -> Iterator[tuple[str, Graph]]:
    """Yield the graph of each form of each module, with the module's path."""
    for path, module in root.named_modules():
        if isinstance(module, GeneratedModule):
            body: Body = module.__dict__[PRIVATE]
            yield from ((path, form.graph) for form in (body, *body.others))


def _not_replaceable(bodies: Sequence[Body], forbidden: str | None) -> Iterator[str]:
    """Yield why no other module may be put in the place of the one that runs ``bodies``."""
    if forbidden is not None:
        yield forbidden
    if any(body.is_part for body in bodies):
        yield IN_PARTS
    elif any(body.signature is None or body.signature.flat for body in bodies):
        yield _FLAT
        if forbidden is None:
            yield _PRESERVE
    elif carries := _most(bodies, "carries"):
        yield read_by_others(carries)
    elif needs := _most(bodies, "needs"):
        yield reads_of_others(needs)


def _not_alone(bodies: Sequence[Body]) -> str | None:
    """Return why the module that runs ``bodies`` cannot be called alone."""
    if any(body.is_part for body in bodies):
        return IN_PARTS
    carried, carries = _most(bodies, "carried"), _most(bodies, "carries")
    if carried or carries:
        return reads_of_others(carried) if carried else read_by_others(carries)
    if any(body.signature is not None and body.signature.loses_writes for body in bodies):
        return _LOSES_WRITES
    untold = untold_forms(bodies)
    return f"is called in {len(bodies)} forms, of which {untold} {_UNTOLD}" if untold else None


def _most(bodies: Sequence[Body], count: str) -> int:
    return max((getattr(body.signature, count, 0) for body in bodies), default=0)
