"""Calls whose signature the user asked export to preserve.

Such a call takes and returns exactly what eager's did, so that its module can be replaced by an
eager one. A value that the call reads besides its arguments (a symbolic size, something that
another call computed) is handed over by keyword under a name that only generated modules know.
"""

from __future__ import annotations

import copy
import inspect
import operator
import sys
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument
from torch.fx import Graph, Node

from lowerdeck.torch_base import OpOverload, pytree, schema_of
from lowerdeck.unflatten.calls.carrying import (
    CARRIED,
    CARRIES,
    NEEDS,
    NOT_RECORDED,
    is_unread_result,
    is_unread_twice,
    must_be_apart,
    must_be_twins,
    must_hand_through,
    notes_of,
)
from lowerdeck.unflatten.calls.recorded_leaves import RecordedConstant
from lowerdeck.unflatten.calls.signature import CallSignature, flatten_like, named_arguments
from lowerdeck.unflatten.results import GIVEN_BACK, RETURNS, nodes_given, recorded_result
from lowerdeck.unflatten.trace.call_tree import Frame


@dataclass(frozen=True, slots=True)
class Absent:
    """Stands for an argument or result that nobody needs, so that export did not keep it."""


Leaf = Node | Absent | None | bool | int | float | str
"""What an argument or a result is: a node of the working graph, or a constant."""


@dataclass(frozen=True, slots=True)
class PreservedCall:
    """One call with a preserved signature.

    Attributes:
        signature: Its structure.
        inputs: What each leaf of the arguments is.
        outputs: What each leaf of the result is.
        written: Results that are arguments written in place, which the caller reads afterwards
            as arguments too, and which arguments they are.
        given: Results that are arguments, which the caller may mean by the same name.
        held: Results that are state of the module, and by which path the caller reads that state.
        apart: Results that may not share memory with arguments, and which arguments these are.
        path: The module's name.
    """

    signature: CallSignature
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    written: Mapping[Node, Node] = field(default_factory=dict)
    given: Mapping[Node, Node] = field(default_factory=dict)
    held: Mapping[Node, str] = field(default_factory=dict)
    apart: Mapping[Node, Sequence[Node]] = field(default_factory=dict)
    path: str = ""

    def nodes(self, leaves: Sequence[Leaf]) -> list[Node]:
        """Return the different nodes among ``leaves``."""
        return list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Node)))


def asked_signatures(program: ExportedProgram) -> dict[str, Any]:
    """Return what export recorded of each call that was to keep its signature, by its name."""
    return {
        entry.fqn: entry.signature
        for entry in program.module_call_graph
        if entry.fqn and entry.signature is not None
    }


def not_recorded(program: ExportedProgram) -> dict[str, str]:
    """Return the modules whose signatures ``export_preserving`` could not record, and why."""
    return notes_of(program, NOT_RECORDED)


def preserved_calls(program: ExportedProgram, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the signature of each call that was to keep one, by the call's name.

    Decomposing can lose what the arguments or results of a call were; then it is None.

    Args:
        program: The program.
        asked: What export recorded.
    """
    others = {node.name for node in program.graph.nodes if _is_another(node)}
    others |= _stand_ins(program.graph)
    renamed = _misnamed_results(program.graph)
    return {
        name: _with_names(signature, renamed) if _is_whole(signature, others) else None
        for name, signature in asked.items()
    }


def warn_of_lost(names: Iterable[str]) -> None:
    """Warn that the calls named so have no signature any more, if there are any."""
    lost = ", ".join(sorted(names))
    if lost:
        warnings.warn(
            f"Decomposing this program lost the arguments or results of {lost}, whose signatures "
            "were to be preserved: these calls take and return flat values, and these modules "
            "cannot be replaced. Unflatten the program before it is decomposed to do that.",
            UserWarning,
            stacklevel=2,
        )


def _misnamed_results(graph: Graph) -> dict[str, str]:
    """Return the name of the result where decomposing an operator made export take another one.

    What a batch norm became hands on new statistics beside its result; export takes the last.
    """
    first: dict[tuple[Node, object], str] = {}
    others: list[tuple[Node, object, str]] = []
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        history = node.meta.get("from_node")
        source, index = node.args
        if history and isinstance(source, Node) and _results_of(str(history[-1].target)) == 1:
            if index == 0:
                first[source, history[-1].name] = node.name
            else:
                others.append((source, history[-1].name, node.name))
    return {
        name: first[source, origin] for source, origin, name in others if (source, origin) in first
    }


@cache
def _results_of(target: str) -> int:
    """Return how many results the operator has that is written so, or 0 if it is none.

    Args:
        target: Such as ``aten.relu.default``.
    """
    parts = target.split(".")
    if len(parts) != 3 or not all(part.isidentifier() for part in parts):
        return 0
    found: Any = torch.ops
    for part in parts:
        found = getattr(found, part, None)
    return len(schema_of(found).returns) if isinstance(found, OpOverload) else 0


def _with_names(signature: Any, renamed: Mapping[str, str]) -> Any:
    made = copy.copy(signature)
    made.inputs, made.outputs = (
        [_renamed(spec, renamed) for spec in specs]
        for specs in (signature.inputs, signature.outputs)
    )
    return made


def _renamed(spec: Any, renamed: Mapping[str, str]) -> Any:
    if spec.name not in renamed:
        return spec
    made = copy.copy(spec)
    made.name = renamed[spec.name]
    return made


def _stand_ins(graph: Graph) -> set[str]:
    """Return the inputs whose names signatures have for results that decomposing dropped.

    Export names a result after the last node that tells its origin. Where nobody reads the result,
    that may be a parameter that went into it.
    """
    origins = {
        node: history[-1] for node in graph.nodes if (history := node.meta.get("from_node"))
    }
    left = {origin.name for node, origin in origins.items() if node.op == "call_function"}
    return {
        node.name
        for node, origin in origins.items()
        # Strict export tells of a parameter where it was read, which is no operator.
        if node.op == "placeholder"
        and origin.name not in left
        and _results_of(str(origin.target)) > 0
    }


def _is_whole(signature: Any, others: Container[str]) -> bool:
    taken, returned = signature.in_spec.num_leaves, signature.out_spec.num_leaves
    if len(signature.inputs) != taken or len(signature.outputs) != returned:
        return False
    names = [spec.name for spec in (*signature.inputs, *signature.outputs)]
    return not any(name in others for name in names)


def _is_another(node: Node) -> bool:
    """Return whether ``node`` only has the name that a result of a decomposed operator had."""
    history = node.meta.get("from_node")
    if node.target is not operator.getitem or not history:
        return False
    origin = str(history[-1].target)
    source = cast("Node", node.args[0])
    return _results_of(origin) > 1 and str(source.target) != origin


def doubtful_names(graph: Graph) -> set[str]:
    """Return names of nodes that decomposing may have given to others than signatures mean.

    Decomposing makes what takes one result out of several anew, and tells no signature its name.
    """
    taken = list(graph.find_nodes(op="call_function", target=operator.getitem))
    told = {source.name for node in graph.nodes for source in node.meta.get("from_node") or ()}
    return {node.name for node in taken if node.meta.get("from_node")} - told


def leaf_names(specs: Sequence[Any]) -> Iterator[tuple[str | None, Leaf]]:
    """Yield for each leaf of a signature the name of its node, or None and the constant it is."""
    for spec in specs:
        if isinstance(spec, ConstantArgument):
            yield None, spec.value
        else:
            yield str(spec.name), Absent()


def preserved_signature(frame: Frame, signature: Any) -> CallSignature:
    """Return the structure of a call, with eager's parameter names if its class is loaded."""
    count = signature.in_spec.child(0).num_children
    known = getattr(signature, "forward_arg_names", None) or _eager_names(frame.type_name, count)
    names, others = named_arguments(signature.in_spec, known)
    return CallSignature(signature.in_spec, signature.out_spec, names, others)


def _eager_names(type_name: str | None, count: int) -> list[str]:
    outer, _, name = (type_name or "").rpartition(".")
    # Not by getattr: a module may import others when it is asked for a name.
    cls: Any = vars(sys.modules[outer]).get(name) if outer in sys.modules else None
    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        return []
    try:
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return []
    kinds = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return [parameter.name for parameter in parameters[:count] if parameter.kind in kinds]


@dataclass(frozen=True, slots=True)
class FlatCall:
    """One call as the outliner makes it, with flat arguments and a flat tuple of results.

    Attributes:
        graph: What the call runs.
        inputs: The outer nodes of the working graph whose values are passed, in order.
        outputs: The inner nodes of the working graph whose values are returned, in order.
        node_map: From nodes of the working graph to those of ``graph``.
        call_node: The call in the caller's graph.
        results: The nodes of the caller's graph that carry ``outputs``.
    """

    graph: Graph
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    node_map: Mapping[Node, Node]
    call_node: Node
    results: tuple[Node, ...]


class SignatureApplier:
    """Changes calls, and the graphs that they run, from flat to preserved structures."""

    def __init__(self) -> None:
        self._replaced: dict[Node, Node] = {}

    def apply(self, call: PreservedCall, cut: FlatCall) -> CallSignature:
        """Change one call and its graph; calls made by that graph must have been changed before.

        Args:
            call: The structure wanted.
            cut: The call as it is.

        Returns:
            The structure of the graph, with what it takes and returns besides.
        """
        wanted, returned = set(call.nodes(call.inputs)), set(call.nodes(call.outputs))
        more_in = [node for node in cut.inputs if node not in wanted]
        more_out = [node for node in cut.outputs if node not in returned]
        here = dict(zip(cut.inputs, cut.call_node.args, strict=True))
        self._take(call, cut, more_in)
        self._return(call, cut, more_out)
        _call(call, cut, more_in, knows=bool(more_in or more_out))
        if more_out:
            cut.call_node.meta[CARRIES] = tuple(node.name for node in more_out)
        needs = cut.call_node.meta[NEEDS] = sum(map(_is_computed, more_in))
        self._replaced.update(_unpack(call, cut, more_out, here))
        return replace(call.signature, carried=len(more_in), carries=len(more_out), needs=needs)

    def _inner(self, cut: FlatCall, node: Node) -> Node | None:
        """Return the node of the call's graph that carries the value of ``node``."""
        found = cut.node_map.get(node)
        # Calls inside were changed before, which replaced what carries their results, perhaps in
        # turn.
        while found in self._replaced:
            found = self._replaced[found]
        return found

    def _take(self, call: PreservedCall, cut: FlatCall, more: Sequence[Node]) -> None:
        """Give the graph one placeholder for each leaf, then one for each further value."""
        graph = cut.graph
        free = {node: cut.node_map[node] for node in cut.inputs}
        placeholders: list[Node] = []
        for index, leaf in enumerate(call.inputs):
            found = free.pop(leaf, None) if isinstance(leaf, Node) else None
            if found is None:
                with graph.inserting_before(next(iter(graph.nodes))):
                    found = graph.placeholder(f"unused_{index}")
            placeholders.append(found)
        placeholders += [cut.node_map[node] for node in more]
        # From the back, each to the front: the last one moved is the first argument.
        for placeholder in reversed(placeholders):
            head = next(iter(graph.nodes))
            if placeholder is not head:
                head.prepend(placeholder)

    def _return(self, call: PreservedCall, cut: FlatCall, more: Sequence[Node]) -> None:
        leaves = [
            self._inner(cut, leaf) if isinstance(leaf, Node) else _constant(leaf)
            for leaf in call.outputs
        ]
        output = next(iter(cut.graph.find_nodes(op="output")))
        output.args = ((*leaves, *(self._inner(cut, node) for node in more)),)


def _is_computed(node: Node) -> bool:
    """Return whether ``node`` is a tensor of the user's, or made of tensors."""
    is_made = node.op == "placeholder" or any(map(_is_tensor, node.all_input_nodes))
    return is_made and _is_tensor(node)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _constant(leaf: Leaf) -> Any:
    return None if isinstance(leaf, Absent) else leaf


def _call(call: PreservedCall, cut: FlatCall, more: Sequence[Node], *, knows: bool) -> None:
    node = cut.call_node
    here = dict(zip(cut.inputs, node.args, strict=True))
    leaves = iter(
        [here[leaf] if isinstance(leaf, Node) else _constant(leaf) for leaf in call.inputs]
    )
    with node.graph.inserting_before(node):
        specs = call.signature.in_spec.children()
        args, kwargs = (_built(spec, leaves, node.graph) for spec in specs)
    if knows:
        kwargs = {**kwargs, CARRIED: tuple(here[value] for value in more)}
    node.args, node.kwargs = tuple(args), kwargs


def _built(spec: pytree.TreeSpec, leaves: Iterator[Any], graph: Graph) -> Any:
    """Return the argument of structure ``spec``, made by nodes of ``graph`` where needed."""
    if spec.is_leaf():
        return next(leaves)
    if spec.type in {tuple, list}:
        return spec.type([_built(child, leaves, graph) for child in spec.children()])
    if spec.type is dict:
        children = [_built(child, leaves, graph) for child in spec.children()]
        return dict(zip(spec.context, children, strict=True))
    flat = [next(leaves) for _ in range(spec.num_leaves)]
    return graph.call_function(pytree.tree_unflatten, (flat, cast("Any", spec)))


def _read_later(cut: FlatCall, here: Mapping[Node, Any]) -> dict[Node, Node]:
    """Return the arguments of a call that its caller reads after it."""
    return {
        leaf: value
        for leaf, value in here.items()
        if isinstance(value, Node) and any(user > cut.call_node for user in value.users)
    }


def _unpack(
    call: PreservedCall, cut: FlatCall, more: Sequence[Node], here: Mapping[Node, Any]
) -> dict[Node, Node]:
    """Let the caller's nodes read the structured result; return what was replaced by what."""
    node = cut.call_node
    results = dict(zip(cut.outputs, cut.results, strict=True))
    written = {leaf: here[argument] for leaf, argument in call.written.items()}
    later = {**_read_later(cut, here), **written}
    apart = {leaf: [here[other] for other in others] for leaf, others in call.apart.items()}
    returned = call.nodes(call.outputs)
    single = {leaf for leaf in returned if is_unread_twice(leaf, call.path)}
    later = {leaf: value for leaf, value in later.items() if not is_unread_result(leaf, call.path)}
    taken = nodes_given(node) if call.given else []
    given = {leaf: taken.index(here[argument]) for leaf, argument in call.given.items()}
    reader = _Reader(node.graph, node, results, later, call.held, apart, single, given)
    result = node
    if more:
        result = reader.node(operator.getitem, (node, 0))
        others = reader.node(operator.getitem, (node, 1))
        for index, value in enumerate(more):
            reader.bind(value, reader.node(operator.getitem, (others, index)))
    whole = recorded_result(call.signature.out_spec, map(_recorded_constant, call.outputs))
    if whole.kind is not None or whole.constant is not None:
        result.meta[RETURNS] = whole
    reader.read(call.signature.out_spec, result, iter(call.outputs))
    reader.drop_unused()
    return reader.replaced


def _recorded_constant(leaf: Leaf) -> RecordedConstant | None:
    return None if isinstance(leaf, (Node, Absent)) else RecordedConstant(leaf, type(leaf))


class _Reader:
    """Points the nodes that carried flat results at their positions in a structured one."""

    def __init__(
        self,
        graph: Graph,
        anchor: Node,
        results: dict[Node, Node],
        later: Mapping[Node, Node],
        held: Mapping[Node, str],
        apart: Mapping[Node, Sequence[Any]],
        single: Container[Node] = (),
        given: Mapping[Node, int] | None = None,
    ) -> None:
        self.graph = graph
        self.anchor = anchor
        self.results = results
        self.later = later
        self.held = held
        self.apart = apart
        self.single = single
        self.given = given or {}
        self.bound: dict[Node, tuple[Node, str]] = {}
        self.name = str(anchor.target)
        self.replaced: dict[Node, Node] = {}
        self.added: list[Node] = []

    def read(
        self, spec: pytree.TreeSpec, value: Node, leaves: Iterator[Leaf], where: str = "its result"
    ) -> None:
        """Let each result node read its leaf of ``value``, which has structure ``spec``."""
        if spec.is_leaf():
            self.bind(next(leaves), value, where)
            return
        if spec.type in {tuple, list, dict}:
            keys = spec.context if spec.type is dict else range(spec.num_children)
            for key, child in zip(keys, spec.children(), strict=True):
                inner = self.node(operator.getitem, (value, key))
                self.read(child, inner, leaves, f"{where}[{key!r}]")
            return
        flat = self.node(flatten_like, (value, spec, "the result"))
        for index in range(spec.num_leaves):
            inner = self.node(operator.getitem, (flat, index))
            self.bind(next(leaves), inner, f"leaf {index} of {where}")

    def node(self, target: Any, args: tuple[Any, ...]) -> Node:
        """Add a node after the last one added."""
        with self.graph.inserting_after(self.anchor):
            self.anchor = self.graph.call_function(target, args)
        self.added.append(self.anchor)
        return self.anchor

    def drop_unused(self) -> None:
        """Erase the nodes that were added but that nobody reads.

        Tensors stay, in the graph alone: code may go on with the size of one that it does not
        read, which is looked at when the module is changed.
        """
        for node in reversed(self.added):
            if not node.users and not _is_tensor(node):
                self.graph.erase_node(node)

    def bind(self, leaf: Leaf, value: Node, where: str = "") -> None:
        """Let what carried ``leaf`` be carried by ``value``.

        An argument must be what the call was given, and state what the module holds.
        """
        old = self.results.pop(leaf, None) if isinstance(leaf, Node) else None
        if isinstance(leaf, Node) and _is_tensor(leaf):
            value.meta.setdefault("val", leaf.meta["val"])
        if old is not None:
            value.meta.update(old.meta)
            old.replace_all_uses_with(value)
            self.replaced[old] = value
            self.graph.erase_node(old)
        if not where or not isinstance(leaf, Node):
            return
        if leaf in self.given:
            value.meta[GIVEN_BACK] = (self.given[leaf], where)
        first, place = self.bound.setdefault(leaf, (value, where))
        if first is not value and leaf not in self.single:
            with self.graph.inserting_after(self.anchor):
                twins = (value, first, self.name, (place, where))
                self.anchor = self.graph.call_function(must_be_twins, twins)
        for argument in self.apart.get(leaf, ()):
            with self.graph.inserting_after(self.anchor):
                checked = (value, argument, self.name)
                self.anchor = self.graph.call_function(must_be_apart, checked)
        wanted = self.later.get(leaf)
        if leaf in self.held:
            with self.graph.inserting_after(self.anchor):
                wanted = self.anchor = self.graph.get_attr(self.held[leaf])
        if wanted is not None:
            with self.graph.inserting_after(self.anchor):
                self.anchor = self.graph.call_function(
                    must_hand_through, (value, wanted, self.name, where)
                )
