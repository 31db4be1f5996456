"""The walk over a program: each distinct call is traced once and copied for the others."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from lowerdeck.decompose._torch_private import (
    as_current_node,
    base_name,
    has_composite_kernel,
    run_fake,
)
from lowerdeck.decompose.calls.facts import TensorFacts
from lowerdeck.decompose.calls.keys import Call, call_of, is_autocast, result_key
from lowerdeck.decompose.calls.memory import PARENT, Memory, Value, View
from lowerdeck.decompose.calls.template import Template, facts_of
from lowerdeck.decompose.copied import copied_results
from lowerdeck.decompose.errors import DecomposeError, TemplateError, WholeProgramError
from lowerdeck.decompose.recording import as_dispatched
from lowerdeck.decompose.templates import Templates, ViewInverse
from lowerdeck.decompose.writer import InheritedMeta, Writer
from lowerdeck.torch_base import (
    SYMBOLS,
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    describe_node,
    plain_number,
    pytree,
    schema_of,
    varies,
)

_ATEN = torch.ops.aten

# What functionalization inverts these views by.
_SCATTERS: Mapping[Any, Any] = MappingProxyType(
    {
        _ATEN.slice.Tensor: _ATEN.slice_scatter.default,
        _ATEN.select.int: _ATEN.select_scatter.default,
    }
)

State = tuple[tuple[Any, Callable[[], Any]], ...]
"""The contexts that calls run in, each with its part of the key."""


class Walk:
    """Writes one graph from others.

    Args:
        writer: Writes the nodes.
        templates: What calls become.
        regions: Write what calls of higher-order operators become, by operator's name.
        state: The contexts that the graph runs in.
        unchanged: Calls of the graph that stay as they are.
    """

    def __init__(
        self,
        writer: Writer,
        templates: Templates,
        regions: Any,
        state: State = (),
        unchanged: Collection[Node] = (),
    ) -> None:
        self.writer = writer
        self.templates = templates
        self.regions = regions
        self.state = state
        self._unchanged = unchanged
        self._inherited_meta: dict[tuple[Node, Node | None], InheritedMeta] = {}
        self._reader: Node | None = None
        self._is_anew: bool = False

    def nested(self, graph: Graph, regions: Any) -> Walk:
        """Return a walk that writes another graph, in the same contexts.

        Args:
            graph: The graph.
            regions: As for the class.
        """
        writer = Writer(graph, self.templates.fakes)
        return Walk(writer, self.templates, regions, self.state)

    def placeholder(self, source: Node, *, requires_grad: bool | None = None) -> Any:
        """Add a placeholder like ``source``; return what it is: a value, a node or a constant.

        Args:
            source: A placeholder of the original graph.
            requires_grad: Whether it requires gradients; None for what its value says.
        """
        made = self.writer.graph.placeholder(str(source.target))
        if made.name != source.name:
            made.name = source.name
        made.meta = dict(source.meta)
        if "val" not in source.meta:
            raise WholeProgramError(f"the input {source.name!r} has no 'val' in its meta")
        held = source.meta["val"]
        if isinstance(held, torch.Tensor):
            known = TensorFacts.of(held)
            if requires_grad is not None:
                known = replace(known, requires_grad=requires_grad)
            self.writer.know(made, known)
            return Value(made, Memory(made), requires_grad=known.requires_grad)
        if isinstance(held, SYMBOLS):
            self.writer.know(made, held)
            return made if varies(held) else plain_number(held)
        return held

    def run(self, gm: GraphModule, env: dict[Node, Any]) -> Any:
        """Write what ``gm`` does; return its output, a tree of values, nodes and constants.

        Args:
            gm: A graph.
            env: What its placeholders are; gets what all of its nodes are.

        Raises:
            WholeProgramError: It cannot be decomposed call by call.
        """
        for node in gm.graph.nodes:
            self._reader = node
            if node.op == "call_function":
                env[node] = self._convert_call(node, env)
            elif node.op == "get_attr":
                env[node] = self.regions.attribute(gm, node)
            elif node.op == "output":
                return map_arg(node.args[0], env.__getitem__)
            elif node.op != "placeholder":
                raise WholeProgramError(f"{node.name!r} is a {node.op}")
        raise WholeProgramError("a graph has no output")

    def inherited_meta(self, source: Node) -> InheritedMeta:
        """Return what nodes that come from ``source`` know of it.

        Args:
            source: A node of an original graph.
        """
        # A regenerated view belongs to the module that reads it. With the stack of the module that
        # made it, which may have ended, it would look like a second call of that module.
        at = self._reader if self._is_anew else None
        known = self._inherited_meta.get((source, at))
        if known is None:
            known = self._inherited_meta[source, at] = InheritedMeta(source, at)
        return known

    def current(self, value: Value) -> Node:
        """Return the node of ``value`` with all that was written to its memory.

        Args:
            value: The value.
        """
        # Views are replayed from the base, as torch's FunctionalTensorWrapper does.
        if not value.is_current:
            node = self.base(value.memory)
            self._is_anew = True
            try:
                for view in value.views:
                    node = self._view(node, view)
            finally:
                self._is_anew = False
            value.node, value.generation = node, value.memory.generation
        return value.node

    def read(self, tree: Any) -> Any:
        """Return a tree with nodes for values, with all that was written to their memory.

        Args:
            tree: Any tree of tuples, lists and dicts.
        """
        if isinstance(tree, Value):
            return self.current(tree)
        if isinstance(tree, (tuple, list)):
            return type(tree)(map(self.read, tree))
        if isinstance(tree, dict):
            return {name: self.read(each) for name, each in tree.items()}
        return tree

    def base(self, memory: Memory) -> Node:
        """Return all of a memory, with all that was written to it.

        Args:
            memory: The memory.
        """
        # Writes are applied when something reads the memory, as in torch's FunctionalStorageImpl.
        pending, memory.pending = memory.pending, []
        for written, views, writer in pending:
            node = written
            bases = [memory.base]
            for view in views[:-1]:
                bases.append(self._view(bases[-1], view))
            # From the innermost view outwards: each inverse gives the new value of what it views.
            for whole, view in zip(reversed(bases), reversed(views), strict=bool(views)):
                node = self._write_through_view(whole, node, view, writer)
            memory.base = node
        return memory.base

    def clone(self, node: Node, source: Node) -> Node:
        """Write a clone of a node; return it.

        Args:
            node: The node.
            source: The node of the original graph that it is written for.
        """
        made: Value = self.call(_ATEN.clone.default, (Value.fresh(node),), {}, source)
        return made.node

    def _view(self, parent: Node, view: View) -> Node:
        call, template = self._found(view, parent)
        result = self._copied(call, template, view.source)
        chosen: Value = result if view.index is None else result[view.index]
        return chosen.node

    def _found(self, view: View, parent: Node) -> tuple[Call, Template]:
        """Return the call that makes a view of a node, and its template."""
        args = tuple(Value.fresh(parent) if arg is PARENT else arg for arg in view.args)
        call = self._call(view.target, args, view.kwargs)
        return call, self.templates.find(call, self._contexts, is_plain=not self.state)

    def _write_through_view(self, whole: Node, new: Node, view: View, source: Node) -> Node:
        values = (Value.fresh(whole), Value.fresh(new))
        target, args, index = view.target, view.args[1:], view.index
        if target is _ATEN.unbind.int:
            # torch's own inverse of ``unbind`` makes sizes that vary constants (2.13).
            dim = (args[0] if args else 0) % len(self.writer.facts(whole).shape)
            target, args, index = _ATEN.select.int, (dim, index), None
        made: Value
        if target in _SCATTERS:
            made = self.call(_SCATTERS[target], (*values, *args), view.kwargs, source)
            return made.node
        made = self.call(ViewInverse(target, index), (*values, args, view.kwargs), {}, source)
        return self.base(made.memory)

    def call(
        self,
        target: Any,
        args: Any,
        kwargs: Any,
        source: Node,
        *,
        is_same: bool = False,
    ) -> Any:
        """Write what a call becomes; return its result: a tree of values, nodes and constants.

        Args:
            target: What is called.
            args: Its arguments: trees of values, nodes and constants.
            kwargs: Its keywords.
            source: The node of the original graph that it is written for.
            is_same: Whether it is the call of that node.

        Raises:
            WholeProgramError: It cannot be decomposed call by call.
        """
        contexts = self._contexts
        # What a region's context changes only tracing tells.
        is_plain = not contexts
        more: tuple[Any, ...] = ()
        if self.templates.rules.by_result and is_same:
            more = (result_key(source.meta.get("val")),)
            contexts = (*contexts, lambda: as_current_node(source))
        call = self._call(target, args, kwargs, more)
        same = source if is_same else None
        template = self.templates.find(call, contexts, same, is_plain=is_plain)
        return self._copied(call, template, source)

    @property
    def _contexts(self) -> tuple[Callable[[], Any], ...]:
        return tuple(enter for _, enter in self.state)

    @property
    def _keys(self) -> tuple[Any, ...]:
        return tuple(key for key, _ in self.state)

    def _call(self, target: Any, args: Any, kwargs: Any, more: tuple[Any, ...] = ()) -> Call:
        state = (*self._keys, *more)
        return call_of(target, args, kwargs, self.current, self.writer.facts, state)

    def _copied(self, call: Call, template: Template, source: Node) -> Any:
        """Write a copy of a template; return the result."""
        became = self.writer.splice(template, call, self.inherited_meta(source))
        self._write(call.key[0], template, call.inputs, became, source)
        return copied_results(self.writer, template, call.inputs, became, source)

    def _write(
        self, target: Any, template: Template, inputs: Any, became: Any, source: Node
    ) -> None:
        for index in template.opaque:
            inputs[index].memory.hidden = True
        if not template.written:
            return
        memories = [value.memory for value in inputs if isinstance(value, Value)]
        for index, node in template.written.items():
            value = inputs[index]
            if value.memory.hidden:
                raise WholeProgramError(
                    f"{target} writes memory that is shared in ways that views do not tell"
                )
            if any(view.target is _ATEN.as_strided.default for view in value.views[1:]):
                # It may show elements of the storage that the view before it does not.
                raise WholeProgramError(f"{target} writes through an as_strided of a view")
            if template.by_base and value.views:
                raise WholeProgramError(f"{target} writes a view, which torch tells by its base")
            # A composite writes in several steps, each of which sees what those before it wrote.
            alone = memories.count(value.memory) == 1
            if not alone and isinstance(target, OpOverload) and has_composite_kernel(target):
                raise WholeProgramError(f"{target} writes memory that it reads by another name")
            value.write(became[node], source)

    def _convert_call(self, node: Node, env: dict[Node, Any]) -> Any:
        """Return the converted call; name it in errors that do not."""
        try:
            return self._node(node, env)
        except DecomposeError:
            raise
        except Exception as error:
            # A node that was changed by hand may be wrong in any way.
            raise TemplateError(
                f"{describe_node(node)} cannot be decomposed: {type(error).__name__}: {error}"
            ) from error

    def _node(self, node: Node, env: dict[Node, Any]) -> Any:
        """Return the values that a call of the original graph returns in the new graph."""
        target: Any = node.target
        args: Any
        kwargs: Any
        args, kwargs = map_arg((node.args, dict(node.kwargs)), env.__getitem__)
        if target is operator.getitem:
            return args[0][args[1]]
        # Regions have graphs of their own, which are walked in turn.
        if isinstance(target, HigherOrderOperator):
            return self.regions.call(self, node, args, kwargs)
        if _is_symbolic(node):
            return self._number(node, args, kwargs)
        if not isinstance(target, OpOverload):
            called = getattr(target, "__name__", target)
            if called == "_enter_autocast":
                raise WholeProgramError(
                    f"{node.name!r} calls _enter_autocast: export leaves autocast around control "
                    "flow (cond, while_loop and the like) as such calls, which are no operators"
                )
            raise WholeProgramError(f"{node.name!r} calls {called}, which is no operator")
        if target is _ATEN.as_strided.default and _has_offset(node):
            raise WholeProgramError(f"{node.name!r} counts from the start of another's storage")
        if torch.Tag.inplace_view in target.tags and target is not _ATEN.detach_.default:
            raise WholeProgramError(f"{node.name!r} changes the shape or memory of its argument")
        if "unbacked_bindings" in node.meta or _gives_nothing(target) or _depends_on_data(target):
            return self._convert_kept(node, args, kwargs)
        is_kept = self.templates.rules.keeps_call(node)
        if is_kept and is_autocast(self._keys):
            raise WholeProgramError(f"{node.name!r} is to be kept in a region of autocast")
        if (is_kept or node in self._unchanged) and self._has_recorded_inputs(node, env):
            return self.copy_unchanged(node, args, kwargs)
        if is_kept:
            return self.copy_unchanged(node, args, kwargs, value=self._run(target, args, kwargs))
        return self.call(target, args, kwargs, node, is_same=True)

    def _run(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return what a call returns for inputs of other strides than the recorded ones."""
        given: Any = self.read((tuple(args), dict(kwargs)))
        args, kwargs = map_arg(given, lambda node: node.meta["val"])
        return run_fake(target, args, kwargs, self.templates.fakes.mode)

    def _has_recorded_inputs(self, node: Node, env: Mapping[Node, Any]) -> bool:
        """Return whether the inputs have the recorded shapes, strides and dtypes."""
        for source in node.all_input_nodes:
            value = env[source]
            if isinstance(value, Value):
                recorded = TensorFacts.of(source.meta["val"]).key()
                # Whether it requires gradients does not matter.
                if self.writer.facts(self.current(value)).key()[:-1] != recorded[:-1]:
                    return False
        return True

    def _number(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Return the node of a computation with numbers, or its constant."""
        held = plain_number(node.meta["val"])
        if not isinstance(held, SYMBOLS):
            if _reads_data(node.target):
                # The number is fixed, but the assertion must go on reading it from the data.
                raise WholeProgramError(f"an assertion fixes {node.name!r}, a number from data")
            return held
        # A size that is computed already is not computed twice, as in torch's retrace.
        known = self.writer.symbol(held)
        return known if known is not None else self.copy_unchanged(node, args, kwargs)

    def _convert_kept(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Return the values of a call that must not be traced: it would create new symbols."""
        target = self._without_item(node.target)
        if not self.templates.rules.keeps(target) or schema_of(target).is_mutable:
            if "unbacked_bindings" in node.meta or _depends_on_data(target):
                raise WholeProgramError(f"{node.name!r} has sizes that are known only at run time")
            return self.call(node.target, args, kwargs, node, is_same=True)
        return self.copy_unchanged(node, args, kwargs, target)

    def _without_item(self, target: Any) -> Any:
        if target is _ATEN.item.default and target not in self.templates.rules.composites:
            return _ATEN._local_scalar_dense.default
        return target

    def copy_unchanged(
        self, node: Node, args: Any, kwargs: Any, target: Any = None, value: Any = None
    ) -> Any:
        """Write a call as it stands; return its result, which has memory of its own.

        Args:
            node: The call.
            args: Its arguments: trees of values, nodes and constants.
            kwargs: Its keywords.
            target: What is called instead; None for the same.
            value: What it returns, on fake tensors; None for what was recorded.
        """
        held = node.meta.get("val") if value is None else value
        made = self._written(node, args, kwargs, held, target)
        if "unbacked_bindings" in node.meta:
            made.meta["unbacked_bindings"] = node.meta["unbacked_bindings"]
        return self._elements(made, held, node)

    def _written(self, node: Node, args: Any, kwargs: Any, held: Any, target: Any = None) -> Node:
        """Write a call with a value; return its node."""
        target = self._without_item(node.target) if target is None else target
        name = base_name(target)
        given = self.read(tuple(args)), self.read(dict(kwargs))
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(given)):
            raise WholeProgramError(f"{node.name!r} is given a tensor that no input is")
        if isinstance(target, OpOverload):
            given = as_dispatched(target, *given)
        made = self.writer.add(target, *given, name, held, self.inherited_meta(node))
        self.writer.know(made, facts_of(held))
        return made

    def _elements(self, made: Node, held: Any, source: Node) -> Any:
        """Return the values that a node gives: itself, or its elements."""
        if isinstance(held, FakeTensor):
            return Value.fresh(made)
        if not isinstance(held, (tuple, list)):
            return made if varies(held) else plain_number(made.meta["val"])
        elements = []
        for index, each in enumerate(held):
            item = self.writer.add(
                operator.getitem, (made, index), {}, "getitem", each, self.inherited_meta(source)
            )
            self.writer.know(item, facts_of(each))
            elements.append(self._elements(item, each, source))
        return type(held)(elements)


def _is_symbolic(node: Node) -> bool:
    """Return whether a node computes a number from numbers and sizes."""
    if isinstance(node.meta.get("val"), SYMBOLS) and "unbacked_bindings" not in node.meta:
        return True
    if isinstance(node.target, OpOverload):
        return node.target in _SIZES or (_reads_data(node.target) and _is_number(node))
    # Other functions may act, as those that enter and leave autocast do: they give no number.
    return _is_number(node)


def _has_offset(node: Node) -> bool:
    parent: Any = node.args[0]
    offset = parent.meta["val"].storage_offset()
    return not isinstance(offset, int) or offset != 0


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (int, float))


def _reads_data(target: object) -> bool:
    return isinstance(target, OpOverload) and torch.Tag.data_dependent_output in target.tags


_SIZES = frozenset(
    {_ATEN.sym_size.int, _ATEN.sym_stride.int, _ATEN.sym_storage_offset.default}
    | {_ATEN.sym_numel.default}
)


def _depends_on_data(target: OpOverload) -> bool:
    """Return whether sizes of the result depend on numbers: the program has named them already."""
    return torch.Tag.dynamic_output_shape in target.tags


@cache
def _gives_nothing(target: OpOverload) -> bool:
    return not schema_of(target).returns
