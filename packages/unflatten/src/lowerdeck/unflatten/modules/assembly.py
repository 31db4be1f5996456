"""Share equal calls and build the hierarchy of modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowerdeck.unflatten._torch_private import (
    buffers_of,
    children_of,
    parameters_of,
    unsaved_buffers_of,
)
from lowerdeck.unflatten.calls.carrying import PRIVATE
from lowerdeck.unflatten.code.call_targets import call_target
from lowerdeck.unflatten.code.code import Source
from lowerdeck.unflatten.modules.bodies import BodyMaker
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

    def add(self, body: Body) -> int:
        """Return the number of the form equal to ``body``, which is added if there is none."""
        number = self.by_key.setdefault(body.latest().key, len(self.found))
        if number == len(self.found):
            self.found.append(body)
        return number


def share(frames: Sequence[Frame], maker: BodyMaker, paths: ModulePaths) -> dict[str, Forms]:
    """Return the forms of each module by its first name; calls name the form that they want.

    Args:
        frames: The calls, each after the calls that it makes.
        maker: Makes what they run.
        paths: The modules.
    """
    found: dict[str, Forms] = {}
    for frame in frames:
        if frame.parent is None:
            continue
        forms = found.setdefault(paths.canonical(frame.path), Forms())
        number = forms.add(maker.body(frame))
        maker.set_target(frame, call_target(frame.accessor, number))
    return found


def in_call_order(root: Frame) -> list[Frame]:
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
        self._functions: dict[object, Callable[..., Any]] = {}
        self._classes: dict[object, type] = {}

    def module(self, forms: Forms | None) -> torch.nn.Module:
        """Return the module with these forms; one that is never called has none."""
        if forms is None:
            return Container()
        first, *others = forms.found
        first.others = others
        kind = InterpreterModuleDispatcher if others else InterpreterModule
        # The sources live as long as the forms do.
        sources = tuple(id(body.source) for body in forms.found)
        made = self._classes.get(sources)
        if made is None:
            functions = tuple(self.function(body.latest()) for body in forms.found)
            made = self._classes.get(functions) or class_with(kind, functions)
            self._classes[functions] = self._classes[sources] = made
        return kind(first, made)

    def function(self, source: Source) -> Callable[..., Any]:
        """Return the function of a source; equal sources give one function."""
        key = (source.key, source.comments)
        found = self._functions.get(key)
        if found is None:
            found = self._functions[key] = source.compile()
        return found


def build_hierarchy(
    root: torch.nn.Module, forms: Mapping[str, Forms], paths: ModulePaths
) -> dict[str, torch.nn.Module]:
    """Install every module under ``root``, in eager's order; return them by their first names."""
    builder = ModuleBuilder()
    made: dict[str, torch.nn.Module] = {"": root}
    for name in paths.order:
        first = paths.canonical(name)
        if first not in made:
            made[first] = builder.module(forms.get(first))
    for name in paths.order:
        if name:
            outer, _, last = name.rpartition(".")
            module = made[paths.canonical(name)]
            children_of(made[paths.canonical(outer)]).setdefault(last, module)
            if isinstance(module, InterpreterModuleDispatcher):
                body: Body = module.__dict__[PRIVATE]
                body.names = (*body.names, last)
    return made


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
