"""Share equal calls and build the hierarchy of modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.fx import Graph

from lowerdeck.graph_fuser import OutlinedRegion
from lowerdeck.unflatten._torch_private import (
    buffers_of,
    children_of,
    parameters_of,
    unsaved_buffers_of,
)
from lowerdeck.unflatten.call_targets import call_target
from lowerdeck.unflatten.call_tree import Frame
from lowerdeck.unflatten.code import Source
from lowerdeck.unflatten.container import Container
from lowerdeck.unflatten.dispatcher import InterpreterModuleDispatcher
from lowerdeck.unflatten.generated_module import Body, class_with
from lowerdeck.unflatten.interpreter_module import InterpreterModule
from lowerdeck.unflatten.module_paths import ModulePaths
from lowerdeck.unflatten.preserved import SignatureApplier
from lowerdeck.unflatten.state import ProgramState, StateKind
from lowerdeck.unflatten.structure import graph_structure
from lowerdeck.unflatten.working_graph import WorkingGraph, attribute_modules


@dataclass(slots=True)
class Form:
    """One way in which a module is called.

    Attributes:
        body: What it runs.
        source: The code of its graph.
    """

    body: Body
    source: Source


@dataclass(slots=True)
class Forms:
    """The different ways in which one module is called, by what tells them apart."""

    by_key: dict[object, int] = field(default_factory=dict)
    found: list[Form] = field(default_factory=list)

    def add(self, form: Form) -> int:
        """Return the number of the form equal to ``form``, which is added if there is none."""
        number = self.by_key.setdefault(form.source.key, len(self.found))
        if number == len(self.found):
            self.found.append(form)
        return number


def share(
    frames: Sequence[Frame],
    cuts: Mapping[Frame, OutlinedRegion],
    working: WorkingGraph,
    paths: ModulePaths,
) -> dict[str, Forms]:
    """Return the forms of each module by its first name; calls name the form that they want.

    Args:
        frames: The calls, each after the calls that it makes.
        cuts: What became of each.
        working: The working graph.
        paths: The modules.
    """
    found: dict[str, Forms] = {}
    applier = SignatureApplier()
    written: dict[object, Source] = {}
    for frame in frames:
        if frame.parent is None:
            continue
        graph = cast("Graph", cuts[frame].module.graph)
        call = working.preserved.get(frame)
        signature = applier.apply(call, cuts[frame]) if call is not None else None
        body = Body(
            graph, signature, attribute_modules(graph, working.attributes), frame.type_name
        )
        form = Form(body, _source(body, written))
        number = found.setdefault(paths.canonical(frame.path), Forms()).add(form)
        target = call_target(frame.accessor, number)
        # torch looks a node up in its graph whenever an attribute of it is set.
        if cuts[frame].call_node.target != target:
            cuts[frame].call_node.target = target
    return found


def _source(body: Body, written: dict[object, Source]) -> Source:
    """Return the source of ``body``; graphs of equal structure get one, which is written once."""
    if body.signature is not None or body.attributes:
        return body.write()
    structure = graph_structure(body.graph)
    found = written.get(structure)
    if found is None:
        found = written[structure] = body.write()
    body.source = found
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
        first, *others = (form.body for form in forms.found)
        first.others = others
        kind = InterpreterModuleDispatcher if others else InterpreterModule
        # The sources live as long as the forms do.
        sources = tuple(id(form.source) for form in forms.found)
        made = self._classes.get(sources)
        if made is None:
            functions = tuple(self.function(form.source) for form in forms.found)
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
            children_of(made[paths.canonical(outer)]).setdefault(last, made[paths.canonical(name)])
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
