"""Modules that run Python code generated from their graphs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from textwrap import indent
from typing import Any, Self

import torch
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import Graph, GraphModule, Node

from lowerdeck.unflatten._torch_private import buffers_of, children_of, module_state, parameters_of
from lowerdeck.unflatten.body import Body
from lowerdeck.unflatten.call_signature import FlatArgsAdapter, is_name, one_line
from lowerdeck.unflatten.cut.graphs import EXTRA_INPUTS
from lowerdeck.unflatten.metadata import CHECKS, FUNCTIONS, PRIVATE, UNCHANGED
from lowerdeck.unflatten.specializations import RUN, Function, PendingCall, dispatcher
from lowerdeck.unflatten.swaps import Container, Refusing, SwapTable, child_at, swap_table

_MARK = "_lowerdeck_generated_class"
_SHARED = frozenset({"graph_signature", "module_call_graph", "range_constraints", "meta"})
"""Descriptions of the program; copies of a module share them."""

_READS = frozenset({"call_module", "get_attr"})
"""Kinds of nodes that read attributes."""


class GeneratedModule(Refusing):
    """Base class of modules with generated code.

    Modules of equal code share one generated subclass with a ``forward``.
    """

    def __init__(self, body: Body) -> None:
        # Not torch.nn.Module.__init__, which is several times slower.
        state = module_state()
        state[PRIVATE] = body
        # Not torch.nn.Module.__setattr__, which dispatches on the value's type.
        object.__setattr__(self, "__dict__", state)

    @property
    def check_input_constraints(self) -> bool:
        """Whether calls of this module and below are checked against the recorded calls.

        Setting it applies to all modules below. Only the setting of the outermost called module
        counts: the root's in ``root(x)``, the block's in ``root.block(x)``.
        """
        is_checked: bool = self.__dict__.get(CHECKS, True)
        return is_checked

    @check_input_constraints.setter
    def check_input_constraints(self, is_checked: bool) -> None:
        """Enable or disable the checks of this module and all modules below."""
        for module in self.modules():
            if isinstance(module, GeneratedModule):
                module.__dict__[CHECKS] = is_checked

    @property
    def graph(self) -> Graph:
        """The graph of this module; call ``recompile`` after editing it."""
        graph: Graph = self.__dict__[PRIVATE].graph
        return graph

    @graph.setter
    def graph(self, graph: Graph) -> None:
        """Replace the graph and regenerate the code."""
        self.__dict__[PRIVATE].built = graph
        GeneratedModule.recompile(self)

    @property
    def graph_module(self) -> GraphModule:
        """A new ``torch.fx.GraphModule`` of the graph, with this module's children and state.

        The graph module takes and returns flat values.
        """
        body: Body = self.__dict__[PRIVATE]
        names = {str(node.target) for node in body.graph.nodes if node.op in _READS}
        values = {name: attrgetter(name)(self) for name in names - body.attributes.keys()}
        return GraphModule({**values, **body.attributes}, body.graph)

    @property
    def code(self) -> str:
        """Python source of ``forward``, with the model's lines as comments.

        Each specialization has its own function.
        """
        body: Body = self.__dict__[PRIVATE]
        return body.text()

    def print_readable(self, print_output: bool = True, **_: object) -> str:
        """Return the code of this module and all below it; print it if ``print_output``.

        Args:
            **_: Further options of torch's method; ignored.
        """
        return print_readable(self, print_output)

    def recompile(self) -> None:
        """Regenerate ``forward`` after the graph was edited."""
        body: Body = self.__dict__[PRIVATE]
        self.__class__ = class_with(_plain_class(type(self)), body, body.compile())

    def finalize(self) -> None:
        """Regenerate ``forward``: an alias of ``recompile`` that torch's modules have."""
        GeneratedModule.recompile(self)

    def type_name(self) -> str | None:
        """Return the qualified name of the eager module's type, or None if unknown."""
        name: str | None = self.__dict__[PRIVATE].type_name
        return name

    def _lowerdeck_moved(self, fn: Any) -> None:
        """Accept any floating-point dtype after a move to another dtype."""
        super()._lowerdeck_moved(fn)
        floats = (torch.float32, torch.float16, torch.bfloat16)
        if any(fn(torch.empty(0, dtype=dtype)).dtype is not dtype for dtype in floats):
            for body in self.__dict__[PRIVATE].specializations:
                body.is_moved = True

    def extra_repr(self) -> str:
        """Return the eager class's ``extra_repr`` if this module has the attributes for it."""
        try:
            return super().extra_repr()
        except (AttributeError, KeyError):
            # A module with a restored type never ran the ``__init__`` of that type.
            return ""

    def __repr__(self) -> str:
        try:
            return super().__repr__()
        except (AttributeError, KeyError):
            return torch.nn.Module.__repr__(self)

    def __copy__(self) -> Self:
        module = object.__new__(type(self))
        module.__dict__.update(self.__dict__)
        module.__dict__[PRIVATE] = copy.deepcopy(self.__dict__[PRIVATE])
        return module

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        # Used for deep copies too: a method looked up on the object, such as ``__deepcopy__``,
        # would be found through a wrapper that forwards attributes, and copy the inner module.
        state = dict(self.__dict__)
        body: Body = state.pop(PRIVATE)
        shared = _Shared({name: state.pop(name) for name in _SHARED.intersection(state)})
        return _restore_class, (_Class(type(self)),), (body, state, shared)

    def __setstate__(self, state: Any) -> None:
        body, attributes, shared = state
        self.__dict__.update(attributes)
        self.__dict__.update(shared.value)
        self.__dict__[PRIVATE] = body
        if _MARK not in vars(type(self)):
            GeneratedModule.recompile(self)


class InterpreterModule(GeneratedModule):
    """Submodule of the eager hierarchy that runs the code of its graph.

    The class has torch's name, but nothing is interpreted. Parameters, buffers and children have
    eager's names and order.
    """

    def __getitem__(self, key: int | str) -> torch.nn.Module:
        return child_at(self, key)


class UnflattenedModule(GeneratedModule):
    """Exported program as a module with eager's hierarchy; returned by ``unflatten``.

    Attributes:
        graph_signature: Roles of the program's inputs and outputs.
        module_call_graph: The program's modules and recorded signatures.
        range_constraints: The range of each symbolic size.
        flat_args_adapter: Converts arguments of another structure to the exported one.
        meta: A copy of the metadata of the exported graph module.
    """

    graph_signature: ExportGraphSignature
    module_call_graph: list[Any]
    range_constraints: dict[Any, Any]
    flat_args_adapter: FlatArgsAdapter | None
    meta: dict[str, Any]

    @property
    def input_placeholders(self) -> list[Node]:
        """Placeholders of the graph, one for each argument leaf."""
        return list(GeneratedModule.graph.__get__(self).find_nodes(op="placeholder"))

    def swappable(self) -> SwapTable:
        """Return which modules can be replaced and called alone, and why others cannot.

        Example:
            >>> import torch
            >>> from lowerdeck.unflatten import export_preserving, unflatten
            >>> eager = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
            >>> print(unflatten(export_preserving(eager, (torch.ones(1, 2),))).swappable())
            0  replace  call
            1  replace  call
        """
        return swap_table(self)


@dataclass(frozen=True, slots=True)
class _Shared:
    """Value shared by deep copies."""

    value: Any

    def __deepcopy__(self, memo: object) -> Self:
        return self


class _Class(_Shared):
    """Generated class of a module; regenerated when unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (_plain_class(self.value),)


def _restore_class(generated: _Class) -> GeneratedModule:
    cls: Any = generated.value
    module: GeneratedModule = cls.__new__(cls)
    return module


def _plain_class(cls: type) -> type:
    while _MARK in vars(cls):
        cls = cls.__bases__[0]
    return cls


def print_readable(module: torch.nn.Module, print_output: bool) -> str:
    """Return the code of ``module`` and all modules below it; print it if ``print_output``."""
    parts: list[str] = []
    for path, inner in module.named_modules():
        body = inner.__dict__.get(PRIVATE)
        type_name = one_line(str((body and body.type_name) or type(inner).__name__))
        name = type_name.rpartition(".")[2]
        shown = name if is_name(name) else "Module"
        parts.append(
            f"class {shown}(torch.nn.Module):  # {one_line(path or '(root)')}: {type_name}"
        )
        parts.append(indent(body.text() if body is not None else "pass\n", "    "))
    text = "\n".join(parts)
    if print_output:
        print(text)
    return text


def give_eager_type(module: GeneratedModule, eager_type: type[torch.nn.Module]) -> None:
    """Make ``module`` also an instance of ``eager_type``; it still runs its own code."""
    body: Body = module.__dict__[PRIVATE]
    body.eager_type = eager_type
    if eager_type.__call__ is not torch.nn.Module.__call__:
        module.__dict__.pop(UNCHANGED, None)
    cls = type(module)
    module.__class__ = class_with(_plain_class(cls), body, getattr(cls, FUNCTIONS))


def class_with(base: type, body: Body, functions: Sequence[Function]) -> type:
    """Return a subclass of ``base`` with one function for each specialization."""
    namespace: dict[str, Any] = {
        "forward": dispatcher(functions) if body.is_dispatched else functions[0],
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        FUNCTIONS: tuple(functions),
        _MARK: True,
    }
    eager_type = body.eager_type
    if eager_type is None or issubclass(base, eager_type):
        return type(base.__name__, (base,), namespace)
    return type(eager_type.__name__, (base, eager_type), namespace)


class InterpreterModuleDispatcher(InterpreterModule):
    """Submodule whose caller selects one of several specializations, or exchanges extra values.

    The caller's code selects the specialization, so that calls may be nested, run in several
    threads or fail. A direct call raises an error: call one of ``call_modules()`` instead.
    """

    def call_modules(self) -> Sequence[InterpreterModule]:
        """Return all specializations in order of first use, each as a module.

        The modules share this module's state, children and hooks.
        """
        body: Body = self.__dict__[PRIVATE]
        functions = getattr(type(self), FUNCTIONS)
        return [
            _module_of(self, specialization, function)
            for specialization, function in zip(body.specializations, functions, strict=True)
        ]

    def __dir__(self) -> list[str]:
        # torch's method reads the first letter of each name, and one name is empty.
        tables = (children_of(self), parameters_of(self), buffers_of(self))
        names = {*dir(type(self)), *self.__dict__, *(name for table in tables for name in table)}
        return sorted(name for name in names if name and not name[0].isdigit())


def _module_of(
    module: InterpreterModuleDispatcher, body: Body, function: Any
) -> InterpreterModule:
    own = replace(body, others=[])
    view: InterpreterModule = class_with(InterpreterModule, own, [function])(own)
    for name, value in module.__dict__.items():
        if name != PRIVATE:
            view.__dict__[name] = value
    return view


def _views(module: InterpreterModuleDispatcher) -> Container:
    """Return a container of the specializations, as children "0", "1" and so on."""
    views = Container()
    for number in range(len(module.__dict__[PRIVATE].specializations)):
        views.add_module(str(number), _GraphCall(module, number))
    return views


class _GraphCall(torch.nn.Module):
    """Module that calls one specialization, with the extra inputs and outputs of a graph."""

    def __init__(self, module: torch.nn.Module, number: int) -> None:
        super().__init__()
        self.__dict__.update(called=module, number=number)

    def forward(self, /, *args: Any, **kwargs: Any) -> Any:
        module, number = self.__dict__["called"], self.__dict__["number"]
        body: Body = module.__dict__[PRIVATE]
        pending = PendingCall(body.name, number, tuple(kwargs.pop(EXTRA_INPUTS, ())))
        before, RUN.pending = RUN.pending, pending
        try:
            result = module(*args, **kwargs)
        finally:
            RUN.pending = before
        signature = body.specializations[number].signature
        has_more = signature is not None and signature.extra_outputs
        return (result, pending.extra_outputs) if has_more else result


# Graphs call a specialization by the path "step..1". Not through __getattr__, which makes strict
# export rename the module's parameters.
setattr(InterpreterModuleDispatcher, "", property(_views))
