"""Share equal calls and build the hierarchy of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from types import FunctionType
from typing import Any

import torch
from torch.fx import Graph

from lowerdeck.graph_fuser import DeferredGraph
from lowerdeck.unflatten._torch_private import (
    buffers_of,
    children_of,
    parameters_of,
    unsaved_buffers_of,
)
from lowerdeck.unflatten.calls.carrying import PRIVATE
from lowerdeck.unflatten.calls.recorded_calls import RecordedCall
from lowerdeck.unflatten.code import call_target
from lowerdeck.unflatten.modules.bodies import BodyMaker
from lowerdeck.unflatten.modules.changes import note_children
from lowerdeck.unflatten.modules.container import Container
from lowerdeck.unflatten.modules.dispatcher import InterpreterModuleDispatcher
from lowerdeck.unflatten.modules.generated_module import Body, class_with
from lowerdeck.unflatten.modules.interpreter_module import InterpreterModule
from lowerdeck.unflatten.trace.call_tree import Frame
from lowerdeck.unflatten.trace.module_paths import ModulePaths
from lowerdeck.unflatten.trace.state import ProgramState, StateKind


@dataclass(slots=True)
class Forms:
    """The different ways in which one module is called, by what tells them apart."""

    by_key: dict[object, int] = field(default_factory=dict)
    found: list[Body] = field(default_factory=list)
    recorded: list[dict[RecordedCall, None]] = field(default_factory=list)
    returned: dict[int, dict[tuple[Any, ...], Graph | DeferredGraph]] = field(default_factory=dict)
    called_as: set[tuple[str, str]] = field(default_factory=set)

    def add(self, body: Body) -> int:
        """Return the number of the form equal to ``body``, which is added if there is none."""
        # Not even equal parts of a call are one form: alone, none of them is the call.
        key = (body.latest().key, len(self.found) if body.is_part else None)
        number = self.by_key.setdefault(key, len(self.found))
        if number == len(self.found):
            self.found.append(body)
            self.recorded.append({})
        for call in body.recorded:
            self.recorded[number][call] = None
        self._note_returned(number, body)
        return number

    def _note_returned(self, number: int, body: Body) -> None:
        """Note of a further call of a form what the calls in it returned, if that differs."""
        first = self.found[number]
        if body is not first and first.returned is not None and body.returned is not None:
            known = self.returned.setdefault(number, {first.returned(): first.made})
            known.setdefault(body.returned(), body.made)

    def tell_recorded(self) -> None:
        """Tell each form what all of its calls were recorded with."""
        # Once, when all are added: to tell it at each call would be quadratic.
        for number, (body, calls) in enumerate(zip(self.found, self.recorded, strict=True)):
            body.recorded = tuple(calls)
            body.alike = list(self.returned.get(number, {}).values())[1:]
            body.returned = None  # it holds the whole program


def share(root: Frame, maker: BodyMaker, paths: ModulePaths) -> dict[str, Forms]:
    """Return the forms of each module by its first name; calls name the form that they want.

    Args:
        root: The call of the outermost module.
        maker: Makes what calls run.
        paths: The modules.
    """
    found: dict[str, Forms] = {}
    for frames, several in _callees_first(root, paths):
        forms = found.setdefault(paths.canonical(frames[0].path), Forms())
        numbers = [forms.add(maker.body(frame)) for frame in frames]
        for frame, number in zip(frames, numbers, strict=True):
            is_form = several or len(forms.found) > 1 or forms.found[0].is_told
            maker.set_target(frame, call_target(frame.accessor, number if is_form else None))
            if is_form and frame.parent is not None:
                forms.called_as.add((paths.canonical(frame.parent.path), frame.accessor))
    for forms in found.values():
        forms.tell_recorded()
    return found


def _callees_first(root: Frame, paths: ModulePaths) -> Iterator[tuple[Sequence[Frame], bool]]:
    """Yield all calls of a module together, after those of every module that it calls.

    Whether a module has several forms is then known before its callers are written. Of modules
    that call themselves it is known anyway: one of their calls makes another, and one makes none.
    Their calls come one by one, and with each whether its module has several forms.
    """
    calls: dict[str, list[Frame]] = {}
    in_order = _in_call_order(root)[:-1]
    for frame in in_order:
        calls.setdefault(paths.canonical(frame.path), []).append(frame)
    if len(calls) == len(in_order):
        # Each module is called once: it comes after what it calls already.
        for frame in in_order:
            yield [frame], False
        return
    called: dict[str, dict[str, None]] = {}
    for frame in in_order:
        if frame.parent is not None:
            outer = called.setdefault(paths.canonical(frame.parent.path), {})
            outer.setdefault(paths.canonical(frame.path))
    try:
        modules = list(TopologicalSorter(called).static_order())
    except CycleError:
        for frame in in_order:
            yield [frame], len(calls[paths.canonical(frame.path)]) > 1
        return
    for module in modules:
        if module in calls:
            yield calls[module], False


def _in_call_order(root: Frame) -> list[Frame]:
    """Return every frame after the frames below it, siblings in the order of their calls."""
    order, stack = [], [root]
    while stack:
        frame = stack.pop()
        order.append(frame)
        stack.extend(frame.children)
    return order[::-1]


class ModuleBuilder:
    """Builds the modules below the outermost one.

    Modules of equal code get one class.
    """

    def __init__(self) -> None:
        self._compiled: dict[object, FunctionType] = {}
        self._functions: dict[object, Callable[..., Any]] = {}
        self._classes: dict[object, type] = {}

    def module(self, forms: Forms | None, path: str) -> torch.nn.Module:
        """Return the module of this path with these forms; one that is never called has none."""
        if forms is None:
            return Container()
        first, *others = forms.found
        first.others = others
        is_told = first.is_told
        if is_told:
            # What is given beside the arguments is for one module, not for others of its code.
            where = "" if all(_is_alone(body) for body in forms.found) else f" {path}"
            first.keys = tuple(
                f"{body.latest().digest()} {number}{where}"
                for number, body in enumerate(forms.found)
            )
        kind = InterpreterModuleDispatcher if is_told else InterpreterModule
        # The sources and what was recorded live as long as the forms do.
        sources = tuple((id(body.source), *map(id, _checked(body))) for body in forms.found)
        made = self._classes.get(sources)
        if made is None:
            functions = tuple(self.function(body) for body in forms.found)
            made = self._classes.get(functions) or class_with(
                kind, functions, is_told=is_told, tells_flat=first.tells_flat
            )
            self._classes[functions] = self._classes[sources] = made
        return kind(first, made)

    def function(self, body: Body) -> Callable[..., Any]:
        """Return the function of a body; equal sources that check for the same give one."""
        source = body.latest()
        code = (source.lines, source.key, source.comments)
        key = (code, body.signature and body.signature.names, *map(id, _checked(body)))
        found = self._functions.get(key)
        if found is None:
            compiled = self._compiled.get(code)
            if compiled is None:
                compiled = self._compiled[code] = source.compile()
            found = self._functions[key] = body.bound(compiled)
        return found


def _is_alone(body: Body) -> bool:
    return body.signature is None or not body.signature.is_told


def _checked(body: Body) -> tuple[RecordedCall, ...]:
    return body.recorded if body.is_checked else ()


def build_hierarchy(
    root: torch.nn.Module, forms: Mapping[str, Forms], paths: ModulePaths
) -> dict[str, torch.nn.Module]:
    """Install every module under ``root``, in eager's order; return them by their first names."""
    builder = ModuleBuilder()
    made: dict[str, torch.nn.Module] = {"": root}
    for name in paths.order:
        first = paths.canonical(name)
        if first not in made:
            made[first] = builder.module(forms.get(first), first)
    for name in paths.order:
        if name:
            outer, _, last = name.rpartition(".")
            module = made[paths.canonical(name)]
            children_of(made[paths.canonical(outer)]).setdefault(last, module)
    for module in made.values():
        note_children(module)
    for first, each in forms.items():
        for caller, name in each.called_as:
            _tell(made[caller], name, made[first])
    return made


def note_uncalled(modules: Mapping[str, torch.nn.Module], used: Iterable[str]) -> None:
    """Note of modules of which nothing is called or read that no one in their place would be.

    Args:
        modules: All, by their first names.
        used: The names of those, without a call, that have an effect all the same: the state of
            which others read, or those for which there is a reason of its own.
    """
    holders: dict[torch.nn.Module, list[torch.nn.Module]] = {}
    for module in modules.values():
        for child in children_of(module).values():
            if child is not None:
                holders.setdefault(child, []).append(module)
    queue = [module for module in modules.values() if not isinstance(module, Container)]
    queue += [modules[name] for name in used if name in modules]
    # What holds one that has an effect has one too.
    found = set(queue)
    for module in queue:
        around = [holder for holder in holders.get(module, ()) if holder not in found]
        found.update(around)
        queue += around
    for module in modules.values():
        if module not in found:
            module.__dict__["_lowerdeck_uncalled"] = True


def _tell(caller: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    """Tell every form of ``caller`` the keys of the forms of what it calls by this name."""
    body: Body = caller.__dict__[PRIVATE]
    for form in (body, *body.others):
        form.keys_of[name] = module.__dict__[PRIVATE].keys


def install_state(
    modules: Mapping[str, torch.nn.Module], state: ProgramState, paths: ModulePaths
) -> None:
    """Give each module its parameters, buffers and constants."""
    for entry, value in state.copies():
        outer, _, last = entry.name.rpartition(".")
        module = modules[paths.canonical(outer)]
        match entry.kind:
            case StateKind.PARAMETER:
                parameters_of(module)[last] = value
            case StateKind.BUFFER:
                buffers_of(module)[last] = value
            case StateKind.TRANSIENT_BUFFER:
                buffers_of(module)[last] = value
                unsaved_buffers_of(module).add(last)
            case StateKind.CONSTANT:
                module.__dict__[last] = value
