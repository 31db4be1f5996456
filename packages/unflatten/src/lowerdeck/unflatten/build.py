"""Deduplicate calls into specializations and build the module hierarchy."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from graphlib import CycleError, TopologicalSorter
from typing import Any

import torch

from lowerdeck.unflatten._torch_private import (
    buffers_of,
    children_of,
    parameters_of,
    unsaved_buffers_of,
)
from lowerdeck.unflatten.body import Body
from lowerdeck.unflatten.codegen.names import call_target
from lowerdeck.unflatten.codegen.source import Source, write_source
from lowerdeck.unflatten.contract import RecordedCall
from lowerdeck.unflatten.cut.graphs import GraphBuilder
from lowerdeck.unflatten.cut.signatures import loaded_class
from lowerdeck.unflatten.cut.working_graph import attribute_modules
from lowerdeck.unflatten.metadata import PRIVATE, UNCHANGED
from lowerdeck.unflatten.module import (
    GeneratedModule,
    InterpreterModule,
    InterpreterModuleDispatcher,
    class_with,
    give_eager_type,
)
from lowerdeck.unflatten.specializations import Site
from lowerdeck.unflatten.swaps import Container, Refusing, restored_class
from lowerdeck.unflatten.trace.calls import Frame
from lowerdeck.unflatten.trace.names import ModulePaths
from lowerdeck.unflatten.trace.program import ProgramState, StateKind


@dataclass(slots=True)
class _Specializations:
    """The distinct calls of one module."""

    by_key: dict[int, int] = field(default_factory=dict)
    bodies: list[Body] = field(default_factory=list)
    sites: dict[str, Site] = field(default_factory=dict)


class ModuleBuilder:
    """Builds all modules below the root.

    Equal calls share one specialization; graphs are built lazily. Modules of equal code share one
    class.

    Args:
        no_signature: The reason why a call without a signature cannot be replaced.
    """

    def __init__(self, graphs: GraphBuilder, paths: ModulePaths, no_signature: str) -> None:
        self.graphs = graphs
        # Shared by the graphs of all bodies.
        self._build_graph = graphs.build
        self.paths = paths
        self.no_signature = no_signature
        working = graphs.working
        self._refusals = {paths.canonical(path): why for path, why in working.refusals.items()}
        self._sources: dict[object, tuple[Source, int]] = {}
        self._source_numbers: dict[object, int] = {}
        self._unique: dict[object, Source] = {}
        self._numbers: dict[Frame, int] = {}
        self._recorded: dict[Frame, RecordedCall] = {}
        self._modules: dict[str, _Specializations] = {}
        self._classes: dict[object, type] = {}
        self._accessors: dict[str, str] = {}

    def share(self) -> None:
        """Find each module's specializations and the targets of its calls."""
        root = self.graphs.working.tree.root
        for frames, is_several in _callees_first(root, self.paths):
            name = self.paths.canonical(frames[0].path)
            module = self._modules.setdefault(name, _Specializations())
            for frame in frames:
                self._add(module, name, frame)
            first = module.bodies[0]
            has_number = is_several or len(module.bodies) > 1 or first.is_dispatched
            for frame in frames:
                number = self._numbers[frame] if has_number else None
                region = self.graphs.regions[frame]
                self.graphs.targets[region] = call_target(frame.accessor, number)

    def _add(self, module: _Specializations, name: str, frame: Frame) -> None:
        graphs = self.graphs
        call = graphs.working.preserved.get(frame)
        signature = graphs.signature(frame)
        structure = graphs.structure(frame)
        attributes = attribute_modules(frame.nodes, graphs.working.attributes)
        written = self._sources.get(structure)
        if written is None:
            source = write_source(graphs.build(frame), signature, attributes, is_checked=True)
            source = self._unique.setdefault((source.key, source.comments), source)
            source_number = self._source_numbers.setdefault(source.key, len(self._source_numbers))
            written = self._sources[structure] = source, source_number
        source, source_number = written
        number = self._numbers[frame] = module.by_key.setdefault(source_number, len(module.bodies))
        inputs = call.inputs if call is not None else graphs.plan.inputs(graphs.regions[frame])
        outputs = call.outputs if call is not None else ()
        recorded = RecordedCall(inputs, outputs, frame.path)
        self._recorded[frame] = recorded
        self.add_sites(frame, module.sites)
        if number == len(module.bodies):
            refusal = self._refusals.get(name, "")
            if signature is None and not refusal:
                refusal = self.no_signature
            module.bodies.append(
                Body(
                    name,
                    partial(self._build_graph, frame),
                    signature,
                    attributes,
                    frame.type_name,
                    source,
                    [recorded],
                    module.sites,
                    refusal=refusal,
                )
            )
        else:
            module.bodies[number].calls.append(recorded)

    def add_sites(self, frame: Frame, sites: dict[str, Site]) -> None:
        """Add a frame's child calls to the call sites of its module.

        A child without a signature has a site only if the code selects its specialization.

        Args:
            sites: Call sites by the child's attribute path; extended.
        """
        graphs = self.graphs
        for child in frame.children:
            name, accessor = self.paths.canonical(child.path), child.accessor
            self._accessors.setdefault(name, accessor)
            call = graphs.working.preserved.get(child)
            if call is None and ".." not in graphs.targets[graphs.regions[child]]:
                continue
            site = sites.get(accessor)
            if site is None:
                out_spec = call.signature.out_spec if call is not None else None
                site = sites[accessor] = Site(name, out_spec)
            site.calls.append(self._recorded[child])

    def build(self, root: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """Install all modules under ``root`` in eager's order; return them by canonical name."""
        canonical = self.paths.canonical
        modules: dict[str, torch.nn.Module] = {"": root}
        for name in self.paths.order:
            first = canonical(name)
            if first not in modules:
                modules[first] = self._module(first)
            if name:
                outer, _, last = name.rpartition(".")
                children_of(modules[canonical(outer)]).setdefault(last, modules[first])
        return modules

    def _module(self, name: str) -> torch.nn.Module:
        module = self._modules.get(name)
        if module is None:
            return Container(name, self._refusals.get(name, ""))
        first = module.bodies[0]
        first.others = tuple(module.bodies[1:])
        kind = InterpreterModuleDispatcher if first.is_dispatched else InterpreterModule
        key = (kind, *[id(body.source) for body in module.bodies])
        cls = self._classes.get(key)
        if cls is None:
            functions = [body.function() for body in module.bodies]
            cls = self._classes[key] = class_with(kind, first, functions)
        generated: torch.nn.Module = cls(first)
        generated.__dict__[UNCHANGED] = self._accessors.get(name)
        return generated


def _callees_first(root: Frame, paths: ModulePaths) -> Iterator[tuple[Sequence[Frame], bool]]:
    """Yield calls grouped by module, callees first.

    Callers are written after the number of callee specializations is known. If any
    module is recursive, all calls are yielded singly, with True if the module has several calls.
    """
    calls: dict[str, list[Frame]] = {}
    in_order = _in_call_order(root)[:-1]
    for frame in in_order:
        calls.setdefault(paths.canonical(frame.path), []).append(frame)
    if len(calls) == len(in_order):
        for frame in in_order:
            yield [frame], False
        return
    callees: dict[str, dict[str, None]] = {}
    for frame in in_order:
        if frame.parent is not None:
            outer = callees.setdefault(paths.canonical(frame.parent.path), {})
            outer.setdefault(paths.canonical(frame.path))
    try:
        modules = list(TopologicalSorter(callees).static_order())
    except CycleError:
        for frame in in_order:
            yield [frame], len(calls[paths.canonical(frame.path)]) > 1
        return
    for module in modules:
        if module in calls:
            yield calls[module], False


def _in_call_order(root: Frame) -> list[Frame]:
    """Return all frames in postorder, siblings in call order."""
    order, stack = [], [root]
    while stack:
        frame = stack.pop()
        order.append(frame)
        stack.extend(frame.children)
    return order[::-1]


@torch.no_grad()
def install_state(
    modules: Mapping[str, torch.nn.Module], state: ProgramState, paths: ModulePaths
) -> None:
    """Install each module's parameters, buffers and constants.

    Args:
        modules: Modules by canonical name.
    """
    for entry, value in state.copies():
        outer, _, last = entry.name.rpartition(".")
        module: Any = modules[paths.canonical(outer)]
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


# Eager classes.


def restore_types(modules: Mapping[str, torch.nn.Module], eager: torch.nn.Module | None) -> None:
    """Make each child also an instance of its eager class.

    Args:
        modules: Modules by name; the root is ``""``.
        eager: The exported module; its children supply classes and plain attributes. Without it,
            loaded classes are looked up by name.
    """
    for name, module in modules.items():
        if not name:
            continue
        model = _child(eager, name)
        body = module.__dict__.get(PRIVATE)
        cls = _eager_class(model) if model is not None else loaded_class(body and body.type_name)
        if cls is None:
            continue
        if isinstance(module, GeneratedModule):
            give_eager_type(module, cls)
        else:
            module.__class__ = restored_class(cls)
        if model is not None:
            _copy_attributes(model, module)
        elif cls.__module__.startswith("torch.nn."):
            _add_missing(cls, module)


def _child(eager: torch.nn.Module | None, name: str) -> torch.nn.Module | None:
    for part in name.split("."):
        eager = children_of(eager).get(part) if eager is not None else None
    return eager


def _eager_class(model: torch.nn.Module) -> type[torch.nn.Module] | None:
    """Return the class of ``model``, or the eager class of a generated module, or None."""
    cls: Any = next(cls for cls in type(model).__mro__ if not issubclass(cls, Refusing))
    return None if cls is torch.nn.Module else cls


def _copy_attributes(model: torch.nn.Module, module: torch.nn.Module) -> None:
    for name, value in vars(model).items():
        if name not in module.__dict__ and not isinstance(value, torch.nn.Module):
            module.__dict__[name] = copy.copy(value)
    for table in (parameters_of, buffers_of, children_of):
        for name, value in table(model).items():
            if value is None:
                table(module).setdefault(name, None)
    module.training = model.training


_OPTIONAL = {
    "bias": ("bias",),
    "affine": ("weight", "bias"),
    "elementwise_affine": ("weight", "bias"),
}
"""For each constructor argument of a torch layer, the parameters that are None without it."""


def _add_missing(cls: type, module: torch.nn.Module) -> None:
    """Register a torch layer's absent parameters as None: code reads ``linear.bias``."""
    options = _OPTIONAL.keys() & inspect.signature(cls).parameters
    for name in (name for option in options for name in _OPTIONAL[option]):
        if not hasattr(module, name):
            parameters_of(module)[name] = None
