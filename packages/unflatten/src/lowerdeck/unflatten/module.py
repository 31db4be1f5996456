"""Modules that run the Python code generated from their graphs."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import indent
from typing import Any, Self

import torch
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import Graph, GraphModule, Node

from lowerdeck.unflatten._torch_private import (
    buffers_of,
    children_of,
    module_state,
    parameters_of,
    share_children_and_state,
)
from lowerdeck.unflatten.body import Body
from lowerdeck.unflatten.call_signature import FlatArgsAdapter, is_name, one_line
from lowerdeck.unflatten.codegen.names import OWN_NAMES, lookup
from lowerdeck.unflatten.cut.graphs import EXTRA_INPUTS
from lowerdeck.unflatten.errors import UnflattenError
from lowerdeck.unflatten.metadata import CHECKS, FUNCTIONS, PRIVATE, UNCHANGED
from lowerdeck.unflatten.specializations import RUN, Function, PendingCall, dispatcher
from lowerdeck.unflatten.swaps import Container, Refusing, SwapTable, child_at, swap_table

_MARK = "_lowerdeck_generated_class"
_SHARED = frozenset({"graph_signature", "module_call_graph", "range_constraints", "meta"})
"""Descriptions of the program, which never change: copies share them."""


class GeneratedModule(Refusing):
    """Base of modules with generated code.

    Each has its own class with a ``forward``, shared by modules of equal code.
    """

    def __init__(self, body: Body) -> None:
        # Not by torch.nn.Module.__init__, which takes several times as long for the same.
        state = module_state()
        state[PRIVATE] = body
        # Not by torch.nn.Module.__setattr__, which looks at the kind of value.
        object.__setattr__(self, "__dict__", state)

    @property
    def check_input_constraints(self) -> bool:
        """Whether a call of this module, and what it calls, is checked against the recorded ones.

        Setting it sets it in all modules below. Only the switch of the module that is called first
        counts: that of the root in ``root(x)``, that of the block in ``root.block(x)``.
        """
        is_checked: bool = self.__dict__.get(CHECKS, True)
        return is_checked

    @check_input_constraints.setter
    def check_input_constraints(self, is_checked: bool) -> None:
        """Switch the checks of this module and of all modules below on or off."""
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
        """Run another graph from now on."""
        self.__dict__[PRIVATE].built = graph
        GeneratedModule.recompile(self)

    @property
    def graph_module(self) -> GraphModule:
        """The graph as a ``torch.fx.GraphModule`` with this module's children and state.

        It takes and returns the flat values of the graph. Its own ``recompile`` generates this
        module's code again, as with ``torch.export.unflatten``.

        Raises:
            UnflattenError: torch.fx cannot write code for it, because a child is called with a
                keyword that is not a Python name.
        """
        body: Body = self.__dict__[PRIVATE]
        if body.view is None:
            try:
                body.view = GraphView(self, body.graph, body.attributes)
            except SyntaxError as error:
                raise UnflattenError(
                    f"torch.fx cannot write code for the graph of a {body.type_name}: {error}. A "
                    "child may be called with a keyword that is not a Python name, such as 'a-b'. "
                    "`code` shows what runs, and `graph` is the graph."
                ) from error
        view: GraphModule = body.view
        return view

    @property
    def code(self) -> str:
        """The Python source of ``forward``, with the model's own lines as comments.

        A module with several specializations has a function for each of them.
        """
        body: Body = self.__dict__[PRIVATE]
        return body.text()

    def print_readable(self, print_output: bool = True, **_: object) -> str:
        """Return the code of this module and of all below it, and print it if wanted.

        Args:
            **_: Further options of torch's method; ignored.
        """
        return print_readable(self, print_output)

    def recompile(self) -> None:
        """Generate ``forward`` again after the graph was edited."""
        body: Body = self.__dict__[PRIVATE]
        body.view = None
        self.__class__ = class_with(_plain_class(type(self)), body, body.compile())

    def finalize(self) -> None:
        """Generate ``forward`` again: torch's name for ``recompile``."""
        GeneratedModule.recompile(self)

    def type_name(self) -> str | None:
        """Return the qualified name of the eager module's type, or None if it is not known."""
        name: str | None = self.__dict__[PRIVATE].type_name
        return name

    def _lowerdeck_moved(self, fn: Any) -> None:
        """Accept any floating-point dtype from now on if the module was moved to another one."""
        super()._lowerdeck_moved(fn)
        floats = (torch.float32, torch.float16, torch.bfloat16)
        if any(fn(torch.empty(0, dtype=dtype)).dtype is not dtype for dtype in floats):
            for body in self.__dict__[PRIVATE].specializations:
                body.is_moved = True

    def extra_repr(self) -> str:
        """Return the text of the eager class, where this module has the attributes for it."""
        try:
            return super().extra_repr()
        except (AttributeError, KeyError):
            # Restored types never ran their constructor.
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
        # Also for deep copies, which look up other methods on the object: a wrapper that forwards
        # attributes would then be copied by the method of the module in it.
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
    """One submodule of the eager hierarchy, running the code of its graph.

    The name is torch's; nothing is interpreted. Parameters, buffers and children are eager's.
    """

    def __getitem__(self, key: int | str) -> torch.nn.Module:
        return child_at(self, key)


class UnflattenedModule(GeneratedModule):
    """An exported program as a module with eager's hierarchy; returned by ``unflatten``.

    Attributes:
        graph_signature: The meaning of the program's inputs and outputs.
        module_call_graph: The program's modules and recorded signatures.
        range_constraints: The range of each symbolic size.
        flat_args_adapter: Converts arguments of another structure into the exported one.
        meta: A copy of the metadata of the exported graph module.
    """

    graph_signature: ExportGraphSignature
    module_call_graph: list[Any]
    range_constraints: dict[Any, Any]
    flat_args_adapter: FlatArgsAdapter | None
    meta: dict[str, Any]

    @property
    def input_placeholders(self) -> list[Node]:
        """The placeholders of the graph, one for each leaf of the arguments."""
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
    """A value that copies share."""

    value: Any

    def __deepcopy__(self, memo: object) -> Self:
        return self


class _Class(_Shared):
    """The generated class of a module; unpickled modules generate it again."""

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


class GraphView(GraphModule):
    """A module's graph with the module's own children and state, called with flat values."""

    def __init__(
        self,
        owner: torch.nn.Module,
        graph: Graph,
        attributes: Mapping[str, torch.nn.Module],
    ) -> None:
        """Create a view.

        Args:
            owner: The module; it is not kept alive.
            attributes: Graph modules for operators such as ``cond``.
        """
        super().__init__({}, Graph(), class_name="GraphModule")
        share_children_and_state(self, owner)
        names = {str(node.target) for node in graph.find_nodes(op="get_attr")}
        self.__dict__.update(
            (name, owner.__dict__[name]) for name in names & owner.__dict__.keys()
        )
        self.__dict__.update(attributes)
        self.graph = graph
        self.__dict__["_owner"] = weakref.ref(owner)

    def recompile(self) -> Any:
        """Generate the code of the graph again, here and in the module, after it was edited."""
        code = super().recompile()
        owner = self.__dict__["_owner"]() if "_owner" in self.__dict__ else None
        if isinstance(owner, GeneratedModule):
            GeneratedModule.recompile(owner)
            owner.__dict__[PRIVATE].view = self
        return code

    def _plain(self) -> GraphModule:
        return GraphModule(self, self.graph)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphModule:
        return copy.deepcopy(self._plain(), memo)

    def __reduce__(self) -> Any:
        return self._plain().__reduce__()


def print_readable(module: torch.nn.Module, print_output: bool) -> str:
    """Return the code of ``module`` and of every module below it, as classes.

    Args:
        print_output: Whether to also print the text.
    """
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
    """Make ``module`` an instance of ``eager_type`` as well; it still runs its own code."""
    body: Body = module.__dict__[PRIVATE]
    body.eager_type = eager_type
    if eager_type.__call__ is not torch.nn.Module.__call__:
        module.__dict__.pop(UNCHANGED, None)
    cls = type(module)
    module.__class__ = class_with(_plain_class(cls), body, getattr(cls, FUNCTIONS))


def shadow_own_names(module: torch.nn.Module) -> None:
    """Make children and state accessible whose names are also names of our attributes."""
    if not isinstance(module, GeneratedModule):
        return
    names: set[str] = set()
    for table in (children_of(module), parameters_of(module), buffers_of(module)):
        names.update(name for name in OWN_NAMES.intersection(table) if name[:2] != "__")
    if names:
        body: Body = module.__dict__[PRIVATE]
        body.shadowed = tuple(sorted(names))
        cls = type(module)
        module.__class__ = class_with(_plain_class(cls), body, getattr(cls, FUNCTIONS))


def class_with(base: type, body: Body, functions: Sequence[Function]) -> type:
    """Return a subclass of ``base`` that runs these functions, one for each specialization."""
    namespace: dict[str, Any] = {
        "forward": dispatcher(functions) if body.is_dispatched else functions[0],
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        FUNCTIONS: tuple(functions),
        _MARK: True,
    }
    namespace.update((name, _shadow(name)) for name in body.shadowed)
    eager_type = body.eager_type
    if eager_type is None or issubclass(base, eager_type):
        return type(base.__name__, (base,), namespace)
    return type(eager_type.__name__, (base, eager_type), namespace)


def _shadow(name: str) -> property:
    return property(lambda module: lookup(module, name))


class InterpreterModuleDispatcher(InterpreterModule):
    """A submodule whose caller selects one of several specializations.

    The caller's code names the specialization, so calls may nest, run in threads and fail. A
    direct call is refused: call one of ``call_modules()``.
    """

    def call_modules(self) -> Sequence[InterpreterModule]:
        """Return all specializations in order of first use, each as a module that runs it alone.

        They share this module's state, children and hooks.
        """
        body: Body = self.__dict__[PRIVATE]
        functions = getattr(type(self), FUNCTIONS)
        return [
            _module_of(self, specialization, function)
            for specialization, function in zip(body.specializations, functions, strict=True)
        ]

    def __dir__(self) -> list[str]:
        # torch's own looks at the first letter of each name, and one name is empty.
        tables = (children_of(self), parameters_of(self), buffers_of(self))
        names = {*dir(type(self)), *self.__dict__, *(name for table in tables for name in table)}
        return sorted(name for name in names if name and not name[0].isdigit())


def _module_of(
    module: InterpreterModuleDispatcher, body: Body, function: Any
) -> InterpreterModule:
    own = replace(body, others=[], view=None)
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
    """A graph's call of a specialization with extra values."""

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
        has_more = signature is not None and signature.carries
        return (result, pending.extra_outputs) if has_more else result


# Graphs call a specialization by the path "step..1". Not by __getattr__: strict export then gives
# the module's parameters other names.
setattr(InterpreterModuleDispatcher, "", property(_views))
