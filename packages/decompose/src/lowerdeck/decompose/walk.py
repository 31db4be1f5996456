"""Convert one graph, call by call."""

from __future__ import annotations

import operator
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg
from torch.fx.node import map_aggregate

from lowerdeck.decompose._torch_private import (
    REPLAYS_PARTS_ALONE,
    base_name,
    declines,
    has_composite_kernel,
    has_unbacked_sizes,
    run_fake,
)
from lowerdeck.decompose.calls.facts import TensorFacts, facts_key, facts_of, is_static
from lowerdeck.decompose.calls.keys import call_of, is_autocast
from lowerdeck.decompose.calls.memory import PARENT, Memory, Value, View
from lowerdeck.decompose.calls.template import Template
from lowerdeck.decompose.copied import copied_results
from lowerdeck.decompose.errors import DecomposeError, TemplateError, WholeProgramError
from lowerdeck.decompose.known_views import (
    FILLED,
    FRESH,
    KNOWN,
    RANGE,
    ZEROS,
    known_operators,
    known_steps,
)
from lowerdeck.decompose.recording import as_dispatched
from lowerdeck.decompose.rules import calls_no_others
from lowerdeck.decompose.templates import Templates, ViewInverse
from lowerdeck.decompose.untraced import TRACED, returns_one_tensor
from lowerdeck.decompose.writer import InheritedMeta, Writer
from lowerdeck.torch_base import (
    SYMBOLS,
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    describe_node,
    plain_number,
    pytree,
    returns_alias,
    schema_of,
    varies,
)

_ATEN = torch.ops.aten
_ASSERTION = _ATEN._assert_scalar.default

# Operators that invert these views in functionalization.
_SCATTERS: Mapping[Any, Any] = MappingProxyType(
    {
        _ATEN.slice.Tensor: _ATEN.slice_scatter.default,
        _ATEN.select.int: _ATEN.select_scatter.default,
    }
)

State = tuple[tuple[Any, Callable[[], Any]], ...]
"""Contexts around calls: pairs of a key and a factory."""


class Walk:
    """Converter of a graph.

    Args:
        regions: Converter of higher-order calls.
        state: Contexts around the graph, outermost first.
        unwritten: Calls that read and return only unmutated memory.
        only_writes: Whether ``unwritten`` calls are copied without decomposition, if the metadata
            of their inputs is as recorded.
    """

    def __init__(
        self,
        writer: Writer,
        templates: Templates,
        regions: Any,
        state: State = (),
        unwritten: Collection[Node] = (),
        *,
        only_writes: bool = False,
    ) -> None:
        self.writer = writer
        self.templates = templates
        self.regions = regions
        self.state = state
        self._unwritten = unwritten
        self._only_writes = only_writes
        self._inherited_meta: dict[tuple[Node, Node | None], InheritedMeta] = {}
        self._unchanged: dict[OpOverload, bool] = {}
        self._kept_by: dict[OpOverload, Callable[..., Any] | None] = {}
        self._known_operators: frozenset[OpOverload] | None = None
        self._reader: Node | None = None
        self._is_regenerating: bool = False

    def placeholder(self, source: Node) -> Any:
        """Add a copy of a placeholder; return a value, a node or a constant.

        Args:
            source: Placeholder of the original graph.

        Raises:
            WholeProgramError: The input has no recorded value, or an unsupported one.
        """
        new_node = self.writer.graph.placeholder(str(source.target))
        if new_node.name != source.name:
            new_node.name = source.name
        new_node.meta = dict(source.meta)
        if "val" not in source.meta:
            raise WholeProgramError(f"the input {source.name!r} has no 'val' in its meta")
        value = source.meta["val"]
        if isinstance(value, torch.Tensor):
            facts = TensorFacts.of(value)
            self.writer.record_facts(new_node, facts)
            return Value(new_node, Memory(new_node), requires_grad=facts.requires_grad)
        if isinstance(value, SYMBOLS):
            self.writer.record_facts(new_node, value)
            return new_node if varies(value) else plain_number(value)
        return value

    def run(self, gm: GraphModule, env: dict[Node, Any]) -> Any:
        """Convert all nodes of ``gm``; return the output tree of values, nodes and constants.

        Args:
            env: Results by node: initially those of the placeholders; updated in place.

        Raises:
            WholeProgramError: A call is not supported.
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
        """Return the metadata that new nodes inherit from ``source``.

        Args:
            source: Node of the original program.
        """
        # Regenerated views belong to the module that reads them: with the original module stack
        # they would look like another call of that module.
        at = self._reader if self._is_regenerating else None
        meta = self._inherited_meta.get((source, at))
        if meta is None:
            meta = self._inherited_meta[source, at] = InheritedMeta(source, at)
        return meta

    def current(self, value: Value) -> Node:
        """Return the node of ``value`` with all writes applied.

        Args:
            value: The value, whose node and generation are updated in place.
        """
        # Views are regenerated from the base, as in torch's FunctionalTensorWrapper.
        if not value.is_current:
            node = self.base(value.memory)
            self._is_regenerating = True
            try:
                for view in value.views:
                    node = self._view(node, view)
            finally:
                self._is_regenerating = False
            value.node, value.generation = node, value.memory.generation
        return value.node

    def read(self, tree: Any) -> Any:
        """Return a tree with the current nodes of its values."""
        return map_aggregate(
            tree, lambda leaf: self.current(leaf) if isinstance(leaf, Value) else leaf
        )

    def base(self, memory: Memory) -> Node:
        """Return the current base node of a memory, with pending writes applied."""
        # Writes are applied lazily, as in torch's FunctionalStorageImpl.
        pending, memory.pending = memory.pending, []
        for written, views, writer in pending:
            node = written
            bases = [memory.base]
            for view in views[:-1]:
                bases.append(self._view(bases[-1], view))
            # From the last view to the base: each inverse returns the new value of the viewed
            # tensor.
            for viewed, view in zip(reversed(bases), reversed(views), strict=bool(views)):
                node = self._write_through_view(viewed, node, view, writer)
            memory.base = node
        return memory.base

    def clone(self, node: Node, source: Node) -> Node:
        """Add and return a clone of a node.

        Args:
            source: Original node whose metadata is inherited.
        """
        result: Value = self.call(_ATEN.clone.default, (Value.fresh(node),), {}, source)
        return result.node

    def _view(self, parent: Node, view: View) -> Node:
        # As functionalization since torch 2.15, so that writes to all parts take linear time.
        view = _view_of_part(view) if REPLAYS_PARTS_ALONE else view
        args = tuple(Value.fresh(parent) if arg is PARENT else arg for arg in view.args)
        result = self.call(view.target, args, view.kwargs, view.source)
        chosen: Value = result if view.index is None else result[view.index]
        return chosen.node

    def _write_through_view(self, viewed: Node, new: Node, view: View, source: Node) -> Node:
        values = (Value.fresh(viewed), Value.fresh(new))
        target, args, index = view.target, view.args[1:], view.index
        if target is _ATEN.unbind.int:
            # torch 2.13's inverse of ``unbind`` specializes dynamic sizes.
            dim = (args[0] if args else 0) % len(self.writer.facts(viewed).shape)
            target, args, index = _ATEN.select.int, (dim, index), None
        result: Value
        if target in _SCATTERS:
            result = self.call(_SCATTERS[target], (*values, *args), view.kwargs, source)
            return result.node
        result = self.call(ViewInverse(target, index), (*values, args, view.kwargs), {}, source)
        return self.base(result.memory)

    def call(
        self,
        target: Any,
        args: Any,
        kwargs: Any,
        source: Node,
        *,
        is_same: bool = False,
        recorded: Any = None,
    ) -> Any:
        """Add the decomposition of a call, and return its result tree.

        Args:
            target: An operator or a ``ViewInverse``.
            args: Trees of values, nodes and constants.
            source: Original node whose metadata is inherited.
            is_same: Whether ``source`` is this call, so that rules may read its result.
            recorded: Fake result of ``source``, if it is this call on inputs as recorded.

        Raises:
            WholeProgramError: The call is not supported.
        """
        key = tuple(part for part, _ in self.state)
        if is_same and self.templates.rules.by_result:
            key = (*key, facts_key(facts_of(source.meta.get("val"))))
        call = call_of(target, args, kwargs, self.current, self.writer.facts, key)
        contexts = [enter for _, enter in self.state]
        template = self.templates.find(call, contexts, source if is_same else None, recorded)
        new_nodes = self.writer.splice(template, call, self.inherited_meta(source))
        self._write(target, template, call.inputs, new_nodes, source)
        writes = self.templates.writes
        return copied_results(self.writer, template, call.inputs, new_nodes, source, writes=writes)

    def _write(
        self, target: Any, template: Template, inputs: Any, new_nodes: Any, source: Node
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
                    f"{target} writes memory that a result aliases in an unknown way"
                )
            if any(view.target is _ATEN.as_strided.default for view in value.views[1:]):
                # It may contain storage elements outside of its parent.
                raise WholeProgramError(f"{target} writes through an as_strided of a view")
            if template.by_base and value.views:
                raise WholeProgramError(f"custom operator {target} writes a view")
            # A composite may write in several steps that read earlier writes.
            is_only_alias = memories.count(value.memory) == 1
            if (
                not is_only_alias
                and isinstance(target, OpOverload)
                and has_composite_kernel(target)
            ):
                raise WholeProgramError(
                    f"{target} writes memory that it also reads through an alias"
                )
            value.write(new_nodes[node], source)

    def _convert_call(self, node: Node, env: dict[Node, Any]) -> Any:
        """Convert a call; add its operator and source line to errors."""
        try:
            return self._node(node, env)
        except DecomposeError:
            raise
        except Exception as error:
            # Rules may fail, and hand-edited graphs be invalid, in any way.
            reason = str(error).strip().partition("\n")[0]
            raise TemplateError(
                f"{describe_node(node)} cannot be traced: {type(error).__name__}: "
                f"{reason}; add the operator to keep, or use a table with another rule for it"
            ) from error

    def _node(self, node: Node, env: dict[Node, Any]) -> Any:
        """Return the result of an original call in the new graph."""
        target: Any = node.target
        args: Any
        kwargs: Any
        is_number = _is_symbolic(node)
        is_check = target is _ASSERTION or (is_number and not varies(node.meta["val"]))
        new_nodes = ChainMap(self.writer.fixed, env) if is_check else env
        args, kwargs = map_arg((node.args, dict(node.kwargs)), new_nodes.__getitem__)
        if target is operator.getitem:
            return args[0][args[1]]
        # Its subgraphs are converted recursively.
        if isinstance(target, HigherOrderOperator):
            return self.regions.call(self, node, args, kwargs)
        if is_number:
            return self._number(node, args, kwargs)
        if not isinstance(target, OpOverload):
            target_name = getattr(target, "__name__", target)
            if target_name == "_enter_autocast":
                raise WholeProgramError(
                    f"{node.name!r} calls _enter_autocast: torch.export records autocast "
                    "around control flow (cond, while_loop and the like) as calls of this function"
                )
            raise WholeProgramError(f"{node.name!r} calls {target_name}, not an operator")
        # Tensors of the new graph have storage offset 0.
        if target is _ATEN.as_strided.default and _has_offset(node):
            raise WholeProgramError(
                f"{node.name!r} calls as_strided on a tensor that has a storage offset"
            )
        # ``detach_`` has this tag, but changes neither shape nor memory.
        if torch.Tag.inplace_view in target.tags and target is not _ATEN.detach_.default:
            raise WholeProgramError(f"{node.name!r} changes the shape or memory of its argument")
        has_new_sizes = torch.Tag.dynamic_output_shape in target.tags
        returns_nothing = not schema_of(target).returns
        if "unbacked_bindings" in node.meta or has_new_sizes or returns_nothing:
            return self._convert_kept(node, args, kwargs)
        is_kept = self.templates.rules.keeps_call(node)
        # A copied call would not cast its arguments.
        if is_kept and is_autocast(tuple(key for key, _ in self.state)):
            raise WholeProgramError(f"{node.name!r} is in keep and in an autocast region")
        is_copied = is_kept or self._becomes_itself(target, node)
        if is_copied and self._has_recorded_inputs(node, env):
            return self.copy_unchanged(node, args, kwargs)
        if is_kept:
            return self.copy_unchanged(node, args, kwargs, value=self._run(target, args, kwargs))
        if (
            target in KNOWN
            and self._has_known_parts(node)
            and self._has_recorded_inputs(node, env)
        ):
            result = self._copy_as_views(node, args)
            if result is not None:
                return result
        recorded = node.meta.get("val") if self._has_recorded_inputs(node, env) else None
        return self.call(target, args, kwargs, node, is_same=True, recorded=recorded)

    def _has_known_parts(self, node: Node) -> bool:
        if self._known_operators is None:
            self._known_operators = known_operators(self.templates.rules)
        # Static calls use templates, which are fast and shared.
        values = (source.meta.get("val") for source in (node, *node.all_input_nodes))
        is_dynamic = not all(is_static(facts_of(value)) for value in values)
        # Views must see later writes.
        is_safe = node in self._unwritten or node.target in FRESH
        is_known = node.target in self._known_operators
        return is_known and is_dynamic and not self.state and is_safe

    def _is_final(self, part: OpOverload, call: Node) -> bool:
        """Return whether an operator in the decomposition of a call is not decomposed further."""
        rules = self.templates.rules
        if part not in rules.others:
            return rules.leaves(part)
        return calls_no_others(part) and declines(rules.others[part], call)

    def _copy_as_views(self, node: Node, args: Any) -> Any:
        """Add a call's known decomposition and return its result, or None if it is unknown."""
        if node.target in FILLED:
            return self._filled(node, *args)
        if node.target in {RANGE, ZEROS}:
            result = node.meta["val"]
            options = {"layout": torch.strided, "device": result.device, "pin_memory": False}
            target, parts = _ATEN.arange.start_step, (0, *args)
            if node.target is ZEROS:
                target, parts, options["dtype"] = _ATEN.full.default, (args[1], 0), result.dtype
            is_left, options = self._is_final(target, node), {**options, **node.kwargs}
            return self.copy_unchanged(node, parts, options, target) if is_left else None
        value: Value = args[0]
        if value.requires_grad:
            return None
        facts = self.writer.facts(self.current(value))
        steps = known_steps(node, self.read(tuple(args[1:])), facts, self.writer.symbol)
        if steps is None or not all(self._is_final(target, node) for target, *_ in steps):
            return None
        for target, others, kwargs, result in steps:
            fake = self.writer.fake(result)
            results = self.copy_unchanged(node, (value, *others), kwargs, target, fake)
            value = results[0] if isinstance(results, tuple) else results
        return value

    def _filled(self, node: Node, first: Value, second: Value, number: Any) -> Any:
        """Add ``where`` with a scalar operand; return None if torch would convert a dtype."""
        is_mask_first = node.target is _ATEN.where.ScalarOther
        mask, value = (first, second) if is_mask_first else (second, first)
        facts = self.writer.facts(self.current(value))
        dtypes = {facts.dtype, node.meta["val"].dtype}
        is_number = type(number) is float and not value.requires_grad
        is_number &= self._is_final(_ATEN.where.self, node)
        if not is_number or len(dtypes) > 1 or not facts.dtype.is_floating_point:
            return None
        fake = self.writer.fake(replace(facts, shape=(), stride=()))
        options = {"dtype": facts.dtype, "layout": torch.strided, "device": facts.device}
        target = _ATEN.scalar_tensor.default
        scalar = self.copy_unchanged(node, (number,), options, target, fake)
        parts = (mask, value, scalar) if is_mask_first else (mask, scalar, value)
        return self.copy_unchanged(node, parts, {}, _ATEN.where.self)

    def _becomes_itself(self, target: OpOverload, node: Node) -> bool:
        """Return whether a call decomposes to itself."""
        if self._only_writes and node in self._unwritten:
            return True
        # Contexts may change results.
        if self.state:
            return False
        rules = self.templates.rules
        is_unchanged = self._unchanged.get(target)
        if is_unchanged is None:
            is_traced = target in TRACED or not returns_one_tensor(target)
            is_unchanged = self._unchanged[target] = rules.leaves(target) and not is_traced
            if not is_traced and rules.by_result and calls_no_others(target):
                self._kept_by[target] = rules.others.get(target)
        rule = self._kept_by.get(target)
        is_unchanged = is_unchanged or (rule is not None and declines(rule, node))
        # Views must see later writes.
        return is_unchanged and (node in self._unwritten or not returns_alias(target))

    def _run(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return the fake result of a call whose inputs differ from the recorded ones."""
        current: Any = self.read((tuple(args), dict(kwargs)))
        args, kwargs = map_arg(current, lambda node: node.meta["val"])
        return run_fake(target, args, kwargs, self.templates.mode)

    def _has_recorded_inputs(self, node: Node, env: Mapping[Node, Any]) -> bool:
        """Return whether the inputs have the recorded shapes, strides and dtypes."""
        for source in node.all_input_nodes:
            value = env[source]
            if isinstance(value, Value):
                node, recorded = self.current(value), source.meta["val"]
                if node.meta["val"] is recorded:
                    continue
                # requires_grad does not matter.
                key = facts_key(self.writer.facts(node))[:-1]
                if key != facts_key(facts_of(recorded))[:-1]:
                    return False
        return True

    def _number(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Return the node of a number, or the number if it is constant."""
        number = plain_number(node.meta["val"])
        # Sizes are computed once, as in torch's retrace.
        existing = self.writer.symbol(number) if isinstance(number, SYMBOLS) else number
        fixed = self.writer.fixed
        is_fixed = _reads_data(node.target) or not fixed.keys().isdisjoint(node.all_input_nodes)
        if existing is not None and not is_fixed:
            return existing
        new_node = self._copy_call(node, args, kwargs, self._without_item(node.target), number)
        if is_fixed:
            # An assertion fixes the number: only assertions still read it from the data.
            fixed[node] = new_node
        return new_node if existing is None else existing

    def _convert_kept(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Return the result of a call whose trace would create new symbols."""
        target = self._without_item(node.target)
        if not self.templates.rules.keeps(target) or schema_of(target).is_mutable:
            # ``one_hot`` with a class count has no unbacked sizes.
            if "unbacked_bindings" in node.meta or has_unbacked_sizes(node.meta.get("val")):
                raise WholeProgramError(f"{node.name!r} has unbacked sizes")
            return self.call(node.target, args, kwargs, node, is_same=True)
        return self.copy_unchanged(node, args, kwargs, target)

    def _without_item(self, target: Any) -> Any:
        if target is _ATEN.item.default and target not in self.templates.rules.composites:
            return _ATEN._local_scalar_dense.default
        return target

    def copy_unchanged(
        self, node: Node, args: Any, kwargs: Any, target: Any = None, value: Any = None
    ) -> Any:
        """Add an unchanged call; return its result, which aliases no other value.

        Args:
            node: Call of the original graph.
            args: Trees of values, nodes and constants.
            target: Operator to call, by default the same.
            value: Fake result, by default the recorded one.
        """
        value = node.meta.get("val") if value is None else value
        target = self._without_item(node.target) if target is None else target
        return self._elements(self._copy_call(node, args, kwargs, target, value), value, node)

    def _copy_call(self, node: Node, args: Any, kwargs: Any, target: Any, value: Any) -> Node:
        arguments = self.read(tuple(args)), self.read(dict(kwargs))
        if isinstance(target, OpOverload):
            arguments = as_dispatched(target, *arguments)
        origin = self.inherited_meta(node)
        new_node = self.writer.add(target, *arguments, base_name(target), value, origin)
        if "unbacked_bindings" in node.meta:
            new_node.meta["unbacked_bindings"] = node.meta["unbacked_bindings"]
        return new_node

    def _elements(self, new_node: Node, value: Any, source: Node) -> Any:
        """Return the result of a node, or the tree of its elements."""
        if isinstance(value, FakeTensor):
            return Value.fresh(new_node)
        if not isinstance(value, (tuple, list)):
            return new_node if varies(value) else plain_number(new_node.meta["val"])
        elements = []
        for index, element in enumerate(value):
            origin = self.inherited_meta(source)
            arguments = (new_node, index)
            item = self.writer.add(operator.getitem, arguments, {}, "getitem", element, origin)
            elements.append(self._elements(item, element, source))
        return type(value)(elements)


def _view_of_part(view: View) -> View:
    """Return a view of one result of a multi-output op as a single-output view."""
    index, args = view.index, view.args[1:]
    if index is None or any(isinstance(leaf, Node) for leaf in pytree.tree_leaves(args)):
        return view
    if view.target is _ATEN.unbind.int:
        target, args = _ATEN.select.int, (*(args or (0,)), index)
    elif view.target in {_ATEN.split.Tensor, _ATEN.split_with_sizes.default}:
        sizes, dim = args if len(args) > 1 else (*args, 0)
        sizes = [sizes] * (index + 1) if isinstance(sizes, int) else sizes
        start = sum(sizes[:index])
        target, args = _ATEN.slice.Tensor, (dim, start, start + sizes[index])
    else:
        return view
    return replace(view, target=target, args=(PARENT, *args), index=None)


def _is_symbolic(node: Node) -> bool:
    """Return whether a node computes a number from numbers or sizes."""
    if isinstance(node.meta.get("val"), SYMBOLS) and "unbacked_bindings" not in node.meta:
        return True
    if isinstance(node.target, OpOverload):
        return node.target in _SIZES or (_reads_data(node.target) and _is_number(node))
    # Other functions may have side effects, such as entering autocast.
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
