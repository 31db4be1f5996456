"""Build graphs of calls lazily, and compare calls without building them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch.fx import Graph, Node

from lowerdeck.graph_fuser import OutlinePlan, Region
from lowerdeck.torch_base import add_node, copy_node, pytree
from lowerdeck.unflatten.call_signature import CallSignature, flatten_like
from lowerdeck.unflatten.cut.working_graph import Absent, Leaf, PreservedCall, WorkingGraph
from lowerdeck.unflatten.trace.calls import Frame

EXTRA_INPUTS = "_lowerdeck_carried"
"""Keyword for extra inputs in calls of a graph."""

EXTRA_OUTPUTS = "has_extra_outputs"
"""Meta key of a call that returns (result, extra outputs)."""

SITE = "is_site"
"""Meta key of a call of a module with a signature or specializations."""

_META = ("val", "stack_trace", "nn_module_stack")


class GraphBuilder:
    """Builds the graphs of all calls.

    Args:
        plan: Outlining plan of the working graph.
        regions: The region of each call.

    Attributes:
        targets: Call target of each region; filled by ``ModuleBuilder.share``.
    """

    def __init__(
        self, working: WorkingGraph, plan: OutlinePlan, regions: Mapping[Frame, Region]
    ) -> None:
        self.working = working
        self.plan = plan
        self.regions = regions
        self.targets: dict[Region, str] = {}
        self._frames = {region: frame for frame, region in regions.items()}
        self._numbers: dict[object, int] = {}
        self._lock = Lock()

    def signature(self, frame: Frame) -> CallSignature | None:
        """Return the signature of a call, with its numbers of extra inputs and outputs."""
        call = self.working.preserved.get(frame)
        if call is None:
            return None
        inputs, outputs = self.extras(frame, call)
        if not inputs and not outputs:
            return call.signature
        return replace(
            call.signature,
            extra_inputs=len(inputs),
            extra_outputs=len(outputs),
            required_inputs=sum(map(_is_computed, inputs)),
        )

    def extras(self, frame: Frame, call: PreservedCall) -> tuple[list[Node], list[Node]]:
        """Return the extra inputs and outputs of a call."""
        region = self.regions[frame]
        inputs, outputs = self.plan.inputs(region), self.plan.outputs(region)
        leaves = (*call.inputs, *call.outputs)
        if len(outputs) == 1 and inputs == call.inputs and outputs == call.outputs:
            return [], []
        return (
            [node for node in inputs if node not in call.inputs],
            [node for node in outputs if node not in leaves],
        )

    def build(self, frame: Frame) -> Graph:
        """Return a new graph of one call or of the root."""
        with self._lock:
            graph, env = Graph(), dict[Node, Node]()
            region = self.regions[frame] if frame.parent is not None else None
            call = self.working.preserved.get(frame)
            extra_outputs: Sequence[Node] = ()
            inputs: Sequence[Leaf] = self.plan.inputs(region) if region is not None else ()
            if call is not None:
                extra_inputs, extra_outputs = self.extras(frame, call)
                inputs = (*call.inputs, *extra_inputs)
            for index, leaf in enumerate(inputs):
                if isinstance(leaf, Node) and leaf not in env:
                    _add_placeholder(graph, env, leaf)
                else:
                    add_node(graph, "placeholder", f"unused_{index}", (), f"unused_{index}")
            for step in self.plan.steps(region):
                if isinstance(step, Region):
                    _CallBuilder(self, graph, env, step).add()
                else:
                    name = str(step.target).replace(".", "_") if step.op == "get_attr" else None
                    env[step] = copy_node(graph, step, env, name)
            if region is not None:
                self._return(graph, env, region, call, extra_outputs)
            return graph

    def _return(
        self,
        graph: Graph,
        env: Mapping[Node, Node],
        region: Region,
        call: PreservedCall | None,
        extra_outputs: Sequence[Node],
    ) -> None:
        result: Any
        if call is not None:
            leaves = [
                env[leaf] if isinstance(leaf, Node) else constant(leaf) for leaf in call.outputs
            ]
            result = (*leaves, *(env[node] for node in extra_outputs))
        elif self.plan.returns_bare(region):
            result = env[self.plan.outputs(region)[0]]
        else:
            result = tuple([env[node] for node in self.plan.outputs(region)])
        add_node(graph, "output", "output", (result,), "output")

    def structure(self, frame: Frame) -> tuple[object, ...]:
        """Return a structural key, equal for calls whose graphs have the same source.

        The key is cheaper than a graph, ignores node names and example values, and includes the
        model's lines, which become comments. Compare keys only while the program is alive: some
        objects are keyed by address.
        """
        plan, region = self.plan, self.regions[frame]
        inputs = plan.inputs(region)
        numbers: dict[Node, int] = {node: number for number, node in enumerate(inputs)}
        key: list[object] = [len(inputs)]
        call = self.working.preserved.get(frame)
        if call is not None:
            key.append(self._spec_number(call.signature))
            key += [_frozen(leaf, numbers) for leaf in call.inputs]
        for step in plan.steps(region):
            if isinstance(step, Region):
                self._add_call(key, step, numbers)
                continue
            # The kind, a string, terminates the previous step's arguments.
            op, target, meta, kwargs = step.op, step.target, step.meta, step.kwargs
            # By id: hashing an operator calls Python code.
            key += op, id(target) if op == "call_function" else target, meta.get("stack_trace")
            if kwargs or step.type is not None or "closes" in meta:
                key.append((_frozen(kwargs, numbers), id(step.type), "closes" in meta))
            for value in step.args:
                key.append(numbers[value] if type(value) is Node else _frozen(value, numbers))
            numbers[step] = len(numbers)
        if call is not None:
            key += [_frozen(leaf, numbers) for leaf in call.outputs]
        key.append((plan.returns_bare(region), *[numbers[node] for node in plan.outputs(region)]))
        return tuple(key)

    def _add_call(self, key: list[object], region: Region, numbers: dict[Node, int]) -> None:
        plan, call = self.plan, self.working.preserved.get(self._frames[region])
        inputs = [numbers[node] for node in plan.inputs(region)]
        outputs = plan.outputs(region)
        key.append((self.targets[region], plan.returns_bare(region), *inputs))
        if call is not None:
            key.append(self._spec_number(call.signature))
            key += [_frozen(leaf, numbers) for leaf in call.inputs]
            key += [outputs.index(leaf) if leaf in outputs else None for leaf in call.outputs]
        for node in outputs:
            numbers[node] = len(numbers)

    def _spec_number(self, signature: CallSignature) -> int:
        key = (signature.in_spec, signature.out_spec, signature.names, signature.is_flat)
        return self._numbers.setdefault(key, len(self._numbers))


class _CallBuilder:
    """Adds one call to a graph, with the recorded argument and result structure."""

    def __init__(
        self, builder: GraphBuilder, graph: Graph, env: dict[Node, Node], region: Region
    ) -> None:
        self.builder = builder
        self.graph = graph
        self.env = env
        self.region = region
        self.outputs = builder.plan.outputs(region)
        self.target = builder.targets.get(region, region.name)
        label = self.target.partition("..")[0].replace(".", "_")
        self.label = label if label.isidentifier() else f"_{label}"

    def add(self) -> None:
        """Add the call."""
        frame = self.builder._frames[self.region]
        call = self.builder.working.preserved.get(frame)
        if call is not None:
            self._add_structured(frame, call)
            return
        inputs = self.builder.plan.inputs(self.region)
        args = tuple([self.env[node] for node in inputs])
        node = add_node(self.graph, "call_module", self.target, args, self.label)
        if ".." in self.target:
            node.meta[SITE] = True
        self._describe(node)
        if self.builder.plan.returns_bare(self.region):
            self.env[self.outputs[0]] = node
            return
        for index, output in enumerate(self.outputs):
            self._bind(output, self._function(operator.getitem, (node, index)))

    def _add_structured(self, frame: Frame, call: PreservedCall) -> None:
        env = self.env
        extra_inputs, extra_outputs = self.builder.extras(frame, call)
        leaves = iter(
            [env[leaf] if isinstance(leaf, Node) else constant(leaf) for leaf in call.inputs]
        )
        args, kwargs = (self._argument(spec, leaves) for spec in call.signature.in_spec.children())
        if extra_inputs or extra_outputs:
            kwargs = {**kwargs, EXTRA_INPUTS: tuple([env[node] for node in extra_inputs])}
        node = add_node(
            self.graph, "call_module", self.target, tuple(args), self.label, dict(kwargs)
        )
        node.meta[SITE] = True
        self._describe(node)
        result = node
        if extra_outputs:
            node.meta[EXTRA_OUTPUTS] = True
            result = self._function(operator.getitem, (node, 0))
            others = self._function(operator.getitem, (node, 1))
            for index, output in enumerate(extra_outputs):
                self._bind(output, self._function(operator.getitem, (others, index)))
        self._read(call.signature.out_spec, result, iter(call.outputs), set(call.inputs))

    def _argument(self, spec: pytree.TreeSpec, leaves: Iterator[Any]) -> Any:
        """Return an argument of structure ``spec``, built by nodes if needed."""
        if spec.is_leaf():
            return next(leaves)
        if spec.type in {tuple, list}:
            return spec.type([self._argument(child, leaves) for child in spec.children()])
        if is_printable_dict(spec):
            children = [self._argument(child, leaves) for child in spec.children()]
            return dict(zip(spec.context, children, strict=True))
        flat = [next(leaves) for _ in range(spec.num_leaves)]
        return self._function(_with_options(pytree.tree_unflatten, treespec=spec), (flat,))

    def _read(
        self,
        spec: pytree.TreeSpec,
        value: Node,
        leaves: Iterator[Leaf],
        arguments: set[Leaf],
    ) -> None:
        """Bind the leaves of a result of structure ``spec``, except those that are arguments."""
        if spec.is_leaf():
            leaf = next(leaves)
            if isinstance(leaf, Node) and leaf not in arguments:
                self._bind(leaf, value)
            return
        if spec.type in {tuple, list} or is_printable_dict(spec):
            keys = spec.context if spec.type is dict else range(spec.num_children)
            for key, child in zip(keys, spec.children(), strict=True):
                part = self._function(operator.getitem, (value, key))
                self._read(child, part, leaves, arguments)
            return
        flatten = _with_options(flatten_like, spec=spec, path="the result")
        flat = self._function(flatten, (value,))
        for index in range(spec.num_leaves):
            leaf = next(leaves)
            if isinstance(leaf, Node) and leaf not in arguments:
                self._bind(leaf, self._function(operator.getitem, (flat, index)))

    def _bind(self, leaf: Node, value: Node) -> None:
        if leaf in self.env:
            return
        value.meta.update((key, leaf.meta[key]) for key in _META if key in leaf.meta)
        self.env[leaf] = value

    def _describe(self, node: Node) -> None:
        if self.outputs:
            meta = self.outputs[0].meta
            node.meta.update((key, meta[key]) for key in _META[1:] if key in meta)

    def _function(self, target: Any, args: tuple[Any, ...]) -> Node:
        return add_node(self.graph, "call_function", target, args, target.__name__)


def _with_options(function: Any, **options: object) -> Any:
    """Return a function with bound constants that torch.fx cannot print as node arguments."""
    called: Any = partial(function, **options)
    called.__name__ = function.__name__
    return called


def is_printable_dict(spec: pytree.TreeSpec) -> bool:
    """Return whether ``spec`` is a dict with literal keys."""
    return spec.type is dict and all(type(key) in {str, int} for key in spec.context)


def constant(leaf: Leaf) -> Any:
    """Return the constant of a leaf; None for an absent one."""
    return None if isinstance(leaf, Absent) else leaf


def _add_placeholder(graph: Graph, env: dict[Node, Node], node: Node) -> None:
    name = node.name
    placeholder = add_node(graph, "placeholder", name, (), name, type_expr=node.type)
    meta = node.meta
    placeholder.meta.update((key, meta[key]) for key in _META if key in meta)
    env[node] = placeholder


def _is_computed(node: Node) -> bool:
    """Return whether ``node`` is a tensor that the user passes or that tensors determine."""

    def is_tensor(value: Node) -> bool:
        return isinstance(value.meta.get("val"), torch.Tensor)

    is_new = node.op == "placeholder" or any(map(is_tensor, node.all_input_nodes))
    return is_new and is_tensor(node)


_BY_VALUE = frozenset({bool, int, str, torch.device})
_BY_TEXT = frozenset({float, complex})


def _frozen(value: Any, numbers: Mapping[Node, int]) -> object:
    """Return a hashable key for an argument: a number for a node, else the value with its type."""
    if isinstance(value, Node):
        return numbers[value]
    kind = type(value)
    if value is None or kind in _BY_VALUE:
        return (kind, value)
    if kind in _BY_TEXT:
        # 0.0 == -0.0.
        return (kind, repr(value))
    if isinstance(value, (tuple, list)):
        return (kind, *[_frozen(item, numbers) for item in value])
    if isinstance(value, dict):
        return (kind, *value, *[_frozen(item, numbers) for item in value.values()])
    if isinstance(value, slice):
        return (kind, *[_frozen(part, numbers) for part in (value.start, value.stop, value.step)])
    if kind is Absent:
        return kind
    return (kind, id(value))
