"""A module that runs the Python code generated from its graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from types import FunctionType
from typing import Any, Self

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.hooks import RemovableHandle

from lowerdeck.graph_fuser import DeferredGraph
from lowerdeck.torch_base import is_getitem
from lowerdeck.unflatten._torch_private import (
    buffers_of,
    children_of,
    module_state,
    parameters_of,
)
from lowerdeck.unflatten.calls.carrying import PRIVATE
from lowerdeck.unflatten.calls.checked_calls import Expected, pattern_of
from lowerdeck.unflatten.calls.chosen_forms import forward_of, method_of
from lowerdeck.unflatten.calls.recorded_calls import RecordedCall, floating_types
from lowerdeck.unflatten.calls.signature import CallSignature, flatten_like
from lowerdeck.unflatten.code import (
    OWN_NAMES,
    Check,
    Source,
    form_name,
    lookup,
    split_call_target,
    write_source,
)
from lowerdeck.unflatten.errors import UnflattenError
from lowerdeck.unflatten.modules.changes import note_copied, watch_around
from lowerdeck.unflatten.modules.flat_calls_told import call_flat
from lowerdeck.unflatten.modules.graph_record import (
    GraphRecord,
    ModuleRecord,
    record_graph,
    record_module,
)
from lowerdeck.unflatten.modules.graph_view import GraphView
from lowerdeck.unflatten.modules.replacing import Holder
from lowerdeck.unflatten.results import (
    GIVEN_BACK,
    GivenBack,
    StateCheck,
    argument_of,
    nodes_given,
    result_checks,
    state_check,
)
from lowerdeck.unflatten.sizes.guards import SizeGuards

Function = Callable[..., Any]


@dataclass(slots=True)
class Body:
    """What a generated module runs.

    Attributes:
        made: The graph, or how to build it; children, parameters and buffers are read from the
            module.
        signature: Structure of arguments and result; None where both are flat.
        attributes: Graph modules that operators such as ``cond`` take.
        type_name: Qualified name of the eager module's type.
        source: What was generated from the graph last.
        others: The bodies of further forms of the module's call.
        shadowed: Names of ours that the model gave to a child or to state.
        eager_type: The class that the module should be an instance of too.
        recorded: The arguments of the calls that have this form.
        is_checked: Whether calls with other arguments are refused.
        unchecked: Whether somebody asked for no checks.
        moved: What types of tensors became when the module was moved to other ones.
        is_part: Whether this is a part of a call that others interrupt.
        is_guarded: Whether its callers check themselves that no other module takes its place.
        keys: What tells each form from all other modules' forms, if the module has several.
        keys_of: The keys of the children that have several forms, by the name that code has for
            them.
        view: The graph as torch's own kind of module, once somebody asked for it.
        watches: Whether the code looks at what calls of children return.
        results: How it does, as the graph was last.
        state: How it looks at the state that it reads, then; None where that may be any.
        guards: What sizes of the program that vary must meet.
        tells_flat: Whether it takes flat values where other modules take eager's arguments.
        alike: The graphs of more calls of the same code, of whose own calls some returned other
            sizes or types.
        returned: Tells what the calls in it returned when it was recorded.
    """

    made: Graph | DeferredGraph
    signature: CallSignature | None = None
    attributes: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    type_name: str | None = None
    source: Source | None = None
    others: Sequence[Body] = ()
    shadowed: tuple[str, ...] = ()
    eager_type: type[torch.nn.Module] | None = None
    recorded: tuple[RecordedCall, ...] = ()
    is_checked: bool = False
    unchecked: bool = False
    moved: dict[torch.dtype, torch.dtype] = field(default_factory=dict)
    is_part: bool = False
    is_guarded: bool = False
    keys: tuple[str, ...] = ()
    keys_of: dict[str, tuple[str, ...]] = field(default_factory=dict)
    view: GraphView | None = None
    watches: bool = False
    results: Mapping[Node, Check] = field(default_factory=dict)
    state: StateCheck | None = None
    guards: SizeGuards = field(default_factory=SizeGuards)
    tells_flat: bool = False
    alike: Sequence[Graph | DeferredGraph] = ()
    returned: Callable[[], tuple[Any, ...]] | None = None

    @property
    def is_told(self) -> bool:
        """Whether callers tell which form a call is, or values beside its arguments."""
        signature = self.signature
        return bool(self.others) or (signature is not None and signature.is_told)

    @property
    def graph(self) -> Graph:
        """The graph, which may be edited from now on."""
        if isinstance(self.made, DeferredGraph):
            self.made = self.made.build()
        return self.made

    def write(self) -> Source:
        """Return the source of the graph as it is now, and remember it."""
        if self.source is None or isinstance(self.made, Graph):
            pattern = pattern_of(self.recorded) if self.is_checked else ()
            graph = self.graph
            state = self.state.check if self.state is not None else None
            self.source = write_source(
                graph, self.signature, self.attributes, pattern, self.results, state
            )
        return self.source

    def watch(self, module: torch.nn.Module) -> bool:
        """Let the code look at what calls return; return whether it is to be written anew.

        Args:
            module: Whose code it is.
        """
        self.watches = True
        graph = _built(self.made)
        others = [_built(each) for each in self.alike]
        written = len(self.signature.updates) if self.signature is not None else 0
        results = result_checks(graph, self.guards, self.type_name, others, written)
        # What is the argument itself has its sizes too.
        self.results = {**results, **given_back(module, graph)}
        # Layers of torch's own take weights of any size; the whole's calls are recorded elsewhere.
        is_any = bool(self.recorded) and not self.is_checked
        self.state = None if is_any else state_check(graph)
        is_other = bool(self.results) or self.state is not None
        if is_other:
            self.made, self.source = graph, None
        return is_other

    def latest(self) -> Source:
        """Return what was generated from the graph last."""
        return self.write() if self.source is None else self.source

    def watch_calls(self, module: torch.nn.Module) -> None:
        """Let the code of a module look at what all its calls return, if it does not yet.

        Args:
            module: The one that runs this.
        """
        found = [form.watch(module) for form in (self, *self.others) if not form.watches]
        if any(found):
            _write_class(module, self)

    def text(self) -> str:
        """Return the source of all forms, each under the name by which callers know it."""
        first, *others = (body.latest().text for body in (self, *self.others))
        named = (
            text.replace("def forward(", f"def {form_name(number)}(", 1)
            for number, text in enumerate(others, start=1)
        )
        return "\n".join((first, *named))

    def compile(self) -> list[Function]:
        """Return the functions of all forms."""
        return [body.bound(body.write().compile()) for body in (self, *self.others)]

    def bound(self, function: FunctionType) -> Function:
        """Return a function of this body's source that checks calls of it."""
        return self.latest().bind(function, Expected(self.recorded, self.signature))

    def copy(self, memo: dict[int, Any]) -> Body:
        """Return a body with graphs of its own."""
        others = [other.copy(memo) for other in self.others]
        made = copy.deepcopy(self.made, memo) if isinstance(self.made, Graph) else self.made
        return replace(
            self,
            made=made,
            others=others,
            view=None,
            moved=dict(self.moved),
            results={},
            state=None,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Body:
        return self.copy(memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return body_of, (self.record(),)

    def record(self) -> tuple[Any, ...]:
        """Return the body as data that pickles."""
        others = [other.record() for other in self.others]
        # What is built for a record is not kept.
        graph = record_graph(_built(self.made))
        alike = tuple(record_graph(_built(each)) for each in self.alike)
        names = (self.type_name, self.shadowed, self.eager_type)
        held = {name: record_module(module) for name, module in self.attributes.items()}
        checks = (self.is_checked, self.unchecked, self.moved, self.is_part, self.is_guarded)
        forms = (self.recorded, self.keys, self.keys_of, (*checks, self.watches, self.tells_flat))
        return (graph, self.signature, held, others, names, forms, self.guards, alike)


def _built(made: Graph | DeferredGraph) -> Graph:
    return made.build() if isinstance(made, DeferredGraph) else made


def body_of(record: tuple[Any, ...]) -> Body:
    """Return the body that ``Body.record`` recorded."""
    graph, signature, attributes, others, names, forms, *later = record
    if not isinstance(graph, GraphRecord):
        raise TypeError(f"expected the record of a graph; found {type(graph).__name__}")
    held = {
        name: value.module() if isinstance(value, ModuleRecord) else value
        for name, value in attributes.items()
    }
    made = Body(graph.graph(), signature, held)
    made.type_name, made.shadowed, made.eager_type = names
    made.recorded, made.keys, made.keys_of, checks = forms
    made.is_checked, made.unchecked, made.moved, made.is_part, made.is_guarded, *more = checks
    # What was saved by former versions has fewer.
    made.watches, made.tells_flat = (*more, False, False)[:2]
    made.guards = later[0] if later else SizeGuards()
    made.alike = [each.graph() for each in later[1]] if len(later) > 1 else ()
    made.others = [body_of(other) for other in others]
    return made


class GeneratedModule(Holder):
    """Base of the modules that ``unflatten`` makes.

    Each has a class of its own (shared by modules of equal code) that carries its ``forward``.
    """

    def __init__(self, body: Body, made_class: type | None = None) -> None:
        # Not by torch.nn.Module.__init__, which takes several times as long for the same.
        self.__dict__.update(module_state())
        self.__dict__[PRIVATE] = body
        if made_class is not None:
            # Not by torch.nn.Module, which asks what kind of value is set.
            object.__setattr__(self, "__class__", made_class)
        else:
            GeneratedModule.recompile(self)

    @property
    def graph(self) -> Graph:
        """The graph of this module; call ``recompile`` after editing it."""
        graph: Graph = self.__dict__[PRIVATE].graph
        return graph

    @graph.setter
    def graph(self, graph: Graph) -> None:
        """Run another graph from now on."""
        self.__dict__[PRIVATE].made = graph
        GeneratedModule.recompile(self)

    @property
    def graph_module(self) -> GraphModule:
        """The graph as a ``torch.fx.GraphModule`` with this module's children and state.

        It takes and returns the flat values that the graph does. Its own ``recompile`` generates
        this module's code anew too, as with ``torch.export.unflatten``.

        Raises:
            UnflattenError: torch.fx writes no code for it: a child is called with a keyword that
                is no name in Python.
        """
        body: Body = self.__dict__[PRIVATE]
        if body.view is None:
            try:
                body.view = GraphView(self, body.graph, body.attributes, _recompiled)
            except SyntaxError as error:
                raise UnflattenError(
                    f"torch.fx writes no code for the graph of a {body.type_name}: {error}. A "
                    "child may be called with a keyword that is no name in Python, such as "
                    "'a-b'. `code` shows what runs, and `graph` is the graph."
                ) from error
        return body.view

    @property
    def code(self) -> str:
        """The Python source of ``forward``, with the model's own lines as comments.

        A module that is called in several forms has a function for each further one, under the
        name by which its callers' code calls it.
        """
        body: Body = self.__dict__[PRIVATE]
        return body.text()

    def recompile(self) -> None:
        """Generate ``forward`` again after the graph was edited."""
        body: Body = self.__dict__[PRIVATE]
        for form in (body, *body.others):
            if form.watches:
                form.watch(self)
        _write_class(self, body)

    def finalize(self) -> None:
        """Generate ``forward`` again: torch's name for ``recompile``."""
        GeneratedModule.recompile(self)

    def type_name(self) -> str | None:
        """Return the qualified name of the eager module's type, or None if it is not known."""
        name: str | None = self.__dict__[PRIVATE].type_name
        return name

    def _lowerdeck_moving(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Keep in mind which types become which, for what is said of wrong ones."""
        body: Body = self.__dict__[PRIVATE]
        for form in (body, *body.others):
            # Of what calls return, and of the whole's arguments, nothing else is noted here.
            for dtype in floating_types(form.recorded) | _FLOATING:
                now = fn(torch.empty(0, dtype=body.moved.get(dtype, dtype))).dtype
                body.moved[dtype] = now

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register a hook as ``torch.nn.Module`` does; it may change what the module returns."""
        watch_around(self)
        return super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register a hook as ``torch.nn.Module`` does; it may change what the module is given."""
        watch_around(self)
        return super().register_forward_pre_hook(*args, **kwargs)

    def extra_repr(self) -> str:
        """Return what the eager class tells of itself, where this module has what it reads."""
        try:
            return super().extra_repr()
        except (AttributeError, KeyError):
            # Restored types never ran their constructor: plain attributes may be missing.
            return ""

    def __repr__(self) -> str:
        try:
            return super().__repr__()
        except (AttributeError, KeyError):
            # As above: some eager classes show plain attributes by a method of their own.
            return torch.nn.Module.__repr__(self)

    def __copy__(self) -> Self:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.__dict__[PRIVATE] = self.__dict__[PRIVATE].copy({})
        note_copied(made)
        return made

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        # For deep copies too, which ask an object for a method of theirs: what is put around a
        # module and hands its attributes on would be copied by the module's.
        state = dict(self.__dict__)
        body: Body = state.pop(PRIVATE)
        shared = _Shared({name: state.pop(name) for name in _DESCRIPTIONS.intersection(state)})
        return _restore_class, (_Class(type(self)),), (body, state, shared)

    def __setstate__(self, state: Any) -> None:
        body, attributes, *shared = state
        self.__dict__.update(attributes)
        for each in shared:
            self.__dict__.update(each.held)
        # 0.3.1 and before pickled the record.
        self.__dict__[PRIVATE] = body if isinstance(body, Body) else body_of(body)
        note_copied(self)
        if _MARK not in vars(type(self)):
            GeneratedModule.recompile(self)


@dataclass(frozen=True, slots=True)
class _Shared:
    """What copies share."""

    held: Mapping[str, Any]

    def __deepcopy__(self, memo: object) -> Self:
        return self


@dataclass(frozen=True, slots=True)
class _Class:
    """The class of a module, which copies share, and of which the rest is generated anew."""

    cls: type

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (_plain_class(self.cls),)


_TAKES_PARTS = (getitem, flatten_like)
_FLOATING = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_DESCRIPTIONS = frozenset({"graph_signature", "module_call_graph", "range_constraints", "meta"})
"""What describes the program and never changes: copies share it."""


def _callee(
    module: torch.nn.Module, call: Node
) -> tuple[GeneratedModule, Body] | tuple[None, None]:
    """Return what ``call`` of the code of ``module`` calls, and the form, if it is generated."""
    path, number = split_call_target(str(call.target))
    held: Any = module
    for name in path.split("."):
        held = children_of(held).get(name) if isinstance(held, torch.nn.Module) else None
    if not isinstance(held, GeneratedModule):
        return None, None
    body: Body = held.__dict__[PRIVATE]
    forms = (body, *body.others)
    return (held, forms[number or 0]) if (number or 0) < len(forms) else (None, None)


def given_back(module: torch.nn.Module, graph: Graph) -> dict[Node, Check]:
    """Return how results that are arguments are to be checked in the code of ``module``.

    What is found before the first change is noted, for what is called tells it.

    Args:
        module: The caller.
        graph: The graph of one of its forms.
    """
    found: dict[Node, Check] = {}
    for call in graph.find_nodes(op="call_module"):
        path, _ = split_call_target(str(call.target))
        queue: list[Node] = [call]
        for node in queue:
            queue += [user for user in node.users if user.target in _TAKES_PARTS]
            if GIVEN_BACK not in node.meta:
                source = _argument_of(module, node)
                if source is None:
                    continue
                where = "its result" if node is call else f"its result[{node.args[1]!r}]"
                node.meta[GIVEN_BACK] = (nodes_given(call).index(source), where)
            if node.users:
                place, where = node.meta[GIVEN_BACK]
                found[node] = GivenBack(path, nodes_given(call)[place].name, where)
    return found


def _argument_of(module: torch.nn.Module, node: Node) -> Node | None:
    """Return what ``node`` of the code of ``module`` was given, and is; None if it is new."""
    call: Any = node.args[0] if is_getitem(node) else node
    if not isinstance(call, Node) or call.op != "call_module":
        return argument_of(node)
    if noted := node.meta.get(GIVEN_BACK):
        place: int = noted[0]
        return nodes_given(call)[place]
    held, form = _callee(module, call)
    if held is None or form is None or form.signature is not None:
        return None
    graph = _built(form.made)
    returned: Any = next(iter(graph.find_nodes(op="output"))).args[0]
    if isinstance(returned, (tuple, list)):
        number: Any = node.args[1] if node is not call else None
        returned = returned[number] if number is not None else None
    while isinstance(returned, Node) and returned.op != "placeholder":
        returned = _argument_of(held, returned)
    places = {each: place for place, each in enumerate(graph.find_nodes(op="placeholder"))}
    given = call.args[places[returned]] if returned in places else None
    return given if isinstance(given, Node) else None


def _write_class(module: torch.nn.Module, body: Body) -> None:
    """Give ``module`` the class that runs ``body`` as it is now."""
    body.view = None
    module.__class__ = class_with(
        _plain_class(type(module)),
        body.compile(),
        body.shadowed,
        body.eager_type,
        body.is_told,
        body.tells_flat,
    )


def _recompiled(module: torch.nn.Module, view: GraphView) -> None:
    if isinstance(module, GeneratedModule):
        GeneratedModule.recompile(module)
        module.__dict__[PRIVATE].view = view


def give_eager_type(module: GeneratedModule, eager_type: type[torch.nn.Module]) -> None:
    """Make ``module`` an instance of ``eager_type`` too, running its own code still."""
    module.__dict__[PRIVATE].eager_type = eager_type
    GeneratedModule.recompile(module)


def shadow_own_names(module: torch.nn.Module) -> None:
    """Let a child or state of ``module`` be found under its name though we use that name too."""
    if not isinstance(module, GeneratedModule):
        return
    names: set[str] = set()
    for held in (children_of(module), parameters_of(module), buffers_of(module)):
        names.update(name for name in OWN_NAMES.intersection(held) if name[:2] != "__")
    if names:
        module.__dict__[PRIVATE].shadowed = tuple(sorted(names))
        GeneratedModule.recompile(module)


def class_with(
    base: type,
    functions: Sequence[Function],
    shadowed: Sequence[str] = (),
    eager_type: type | None = None,
    is_told: bool = False,
    tells_flat: bool = False,
) -> type:
    """Return a subclass of ``base`` whose ``forward`` is the first function.

    If callers tell how it is meant, each function is what a call of its form runs, by a method of
    that form's name. If it tells that it takes flat values, it does so where it is given others.
    """
    namespace: dict[str, Any] = {
        "forward": forward_of(functions) if is_told else functions[0],
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        _MARK: True,
    }
    for number, function in enumerate(functions if is_told else ()):
        namespace[form_name(number)] = method_of(number, function)
    if is_told:
        namespace[FUNCTIONS] = tuple(functions)
    if tells_flat:
        namespace["__call__"] = call_flat
    namespace.update((name, _held(name)) for name in shadowed)
    if eager_type is None or issubclass(base, eager_type):
        return type(base.__name__, (base,), namespace)
    return type(eager_type.__name__, (base, eager_type), namespace)


def _held(name: str) -> property:
    return property(lambda module: lookup(module, name))


_MARK = "_lowerdeck_generated_class"
FUNCTIONS = "forms..functions"
"""Where a class holds the functions of all forms: no name of state or a child holds a dot."""


def _plain_class(cls: type) -> type:
    while _MARK in vars(cls):
        cls = cls.__bases__[0]
    return cls


def _restore_class(made: _Class | type[GeneratedModule]) -> GeneratedModule:
    cls: Any = made.cls if isinstance(made, _Class) else made
    found: GeneratedModule = cls.__new__(cls)
    return found
