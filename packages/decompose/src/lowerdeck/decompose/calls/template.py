"""Templates: decompositions of distinct calls, copied for each call with the same key."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node, map_arg

from lowerdeck.decompose._torch_private import WRITING_CUSTOM, base_name, has_composite_kernel
from lowerdeck.decompose.calls.facts import facts_of, is_static
from lowerdeck.decompose.calls.keys import Slot
from lowerdeck.decompose.calls.memory import PARENT, View
from lowerdeck.decompose.errors import WholeProgramError
from lowerdeck.decompose.recording import Recording, eliminate_dead_code
from lowerdeck.torch_base import (
    HigherOrderOperator,
    OpOverload,
    hides_effects,
    pytree,
    returns_alias,
    schema_of,
)

_ATEN = torch.ops.aten


class Step(NamedTuple):
    """Node of a template.

    Attributes:
        node: Recorded node, with template nodes as arguments.
        name: Base name of copies.
        facts: Facts of the result: ``TensorFacts``, a symbol, or a tuple of them.
        meta: Metadata of copies in addition to inherited metadata.
    """

    node: Node
    name: str
    facts: Any
    meta: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """Tensor or symbol that a call returns.

    Attributes:
        node: Node in the template.
        root: Node whose memory it aliases: a placeholder or an allocating node.
        views: Chain of views from the root.
        returned: Position of the input that is returned itself, else None.
        requires_grad: Whether it is a view of a tensor that requires gradients.
        fresh: Whether it aliases nothing although its node is an input or view, because the rule
            returns an alias where the operator does not.
    """

    node: Node
    root: Node
    views: tuple[View, ...]
    returned: int | None
    requires_grad: bool = False
    fresh: bool = False


class Template(NamedTuple):
    """Decomposition of a call.

    Attributes:
        inputs: Placeholders of the call's distinct inputs.
        results: Tree with ``Result`` for tensors and symbols.
        written: New values of mutated inputs, by position of the input.
        opaque: Inputs that a result may alias in an unknown way.
        by_base: Whether the decomposition calls a mutating custom operator; on a view, the
            arguments of that call depend on the base and the view's position in it.
    """

    inputs: tuple[Node, ...]
    steps: tuple[Step, ...]
    results: Any
    written: Mapping[int, Node]
    opaque: frozenset[int]
    by_base: bool

    @property
    def is_static(self) -> bool:
        """Return whether the template has no symbols, so that programs can share it."""
        return all(is_static(step.facts) for step in self.steps)

    @classmethod
    def of(
        cls, recording: Recording, target: object, undecomposed: Recording | None = None
    ) -> Template:
        """Return the template of a recorded call.

        Args:
            recording: The recording, whose nodes are moved to the template.
            undecomposed: The same call recorded without rules. The views from an input to a result
                are read from it, because the inverse of a view differs from the inverse of its
                decomposition. None if no result is a view.

        Raises:
            WholeProgramError: A copy could not reproduce the effects of the call.
        """
        _check(recording)
        graph = recording.graph
        results_of_call = {*pytree.tree_leaves(recording.result), *recording.written.values()}
        eliminate_dead_code(graph, results_of_call)
        alive = [node for node in graph.nodes if node.op != "placeholder"]
        steps = tuple(map(_step, alive))
        if any(map(_reads_storage, alive)) and "as_strided" not in str(target):
            raise WholeProgramError(f"{target} is decomposed into as_strided with an offset")
        by_base = any(node.target is WRITING_CUSTOM for node in alive)
        results = _Results(recording, target, undecomposed)
        tree = results.tree()
        for node in graph.nodes:
            # Fake tensors would keep their program's ShapeEnv alive.
            node.meta = {}
        return cls(
            tuple(recording.inputs),
            steps,
            tree,
            recording.written,
            frozenset(results.opaque),
            by_base,
        )


class _Results:
    """Results of a recording, with their aliases.

    Attributes:
        opaque: Inputs that a result may alias in an unknown way.
    """

    def __init__(
        self, recording: Recording, target: object, undecomposed: Recording | None
    ) -> None:
        self._recording = recording
        # Rules run below functionalization, composites are decomposed above it.
        self._is_decomposed_by_rule = isinstance(target, OpOverload) and not has_composite_kernel(
            target
        )
        self._inputs = {node: index for index, node in enumerate(recording.inputs)}
        self._undecomposed = undecomposed
        self._leaves = pytree.tree_leaves(undecomposed.result) if undecomposed is not None else []
        self.opaque: set[int] = set()

    def tree(self) -> Any:
        """Return the result tree."""
        leaves, spec = pytree.tree_flatten(self._recording.result)
        origins = [
            self._origin_of_result(position, leaf) if isinstance(leaf, Node) else None
            for position, leaf in enumerate(leaves)
        ]
        roots = Counter(origin[0] for origin in origins if origin is not None)
        results = [
            leaf if origin is None else self._result(position, leaf, *origin, roots[origin[0]] > 1)
            for position, (leaf, origin) in enumerate(zip(leaves, origins, strict=True))
        ]
        return pytree.tree_unflatten(results, spec)

    def _result(
        self, position: int, leaf: Node, root: Node, views: tuple[View, ...], is_shared: bool
    ) -> Result:
        recording = self._recording
        if position in recording.returned:
            return Result(leaf, leaf, (), recording.returned[position])
        for index in recording.shared.get(position, ()):
            if recording.inputs[index] is not root or index in recording.written:
                self.opaque.add(index)
        # Storages of functional tensors determine aliases, not recorded nodes: rules below
        # functionalization may omit a clone, and their views are never written through.
        fresh = position in recording.unaliased and (
            is_shared
            or root in self._inputs
            or (
                bool(views)
                and (self._is_decomposed_by_rule or self._is_view_only_inside(position))
            )
        )
        return Result(leaf, root, views, None, position in recording.differentiable, fresh)

    def _is_view_only_inside(self, position: int) -> bool:
        """Return whether a result is a view in the decomposition, but not of the operator."""
        if self._undecomposed is None:
            return False
        leaf = self._leaves[position]
        # Operators with hidden aliases return views as well.
        return (
            isinstance(leaf, Node) and parent_of(leaf) is None and not hides_effects(leaf.target)
        )

    def _origin_of_result(self, position: int, leaf: Node) -> tuple[Node, tuple[View, ...]]:
        """Return the root of a result, and its chain of views."""
        if self._undecomposed is not None and position in self._recording.shared:
            inputs = {node: index for index, node in enumerate(self._undecomposed.inputs)}
            root, views = _origin(self._leaves[position], inputs)
            if root in inputs:
                return self._recording.inputs[inputs[root]], views
        return _origin(leaf, self._inputs)


def _check(recording: Recording) -> None:
    if recording.unbacked:
        raise WholeProgramError("an operator creates unbacked sizes")
    if recording.graph.find_nodes(op="get_attr"):
        raise WholeProgramError("a decomposition has a constant tensor: create it with torch.full")
    if recording.tokens:
        raise WholeProgramError("an operator has effect tokens")


def _step(node: Node) -> Step:
    if isinstance(node.target, HigherOrderOperator) and node.target is not WRITING_CUSTOM:
        raise WholeProgramError(f"a decomposition calls {node.target}")
    meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
    return Step(node, base_name(node.target), facts_of(node.meta.get("val")), meta)


def _reads_storage(node: Node) -> bool:
    """Return whether a node has a storage offset, which copies of the template cannot adapt."""
    return "as_strided" in str(node.target) and len(node.args) > 3


_KEPT_META = ("original_aten", "tensor_meta")


def parent_of(node: Node) -> Node | None:
    """Return the argument that a node views, or None.

    Args:
        node: Node of a functional graph.

    Raises:
        WholeProgramError: The node returns an alias, but not of a positional argument.
    """
    if node.target is operator.getitem:
        source = node.args[0]
        return parent_of(source) if isinstance(source, Node) else None
    if not isinstance(node.target, OpOverload) or not returns_alias(node.target):
        return None
    for argument, value in zip(schema_of(node.target).arguments, node.args, strict=False):
        if argument.alias_info is not None:
            return value if isinstance(value, Node) else None
    raise WholeProgramError(f"{node.target} returns an alias of an unknown argument")


def _origin(node: Node, inputs: Mapping[Node, int]) -> tuple[Node, tuple[View, ...]]:
    """Return the root of a chain of views, and the chain."""
    views: list[View] = []
    while node not in inputs and (parent := parent_of(node)) is not None:
        views.append(_view_step(node, inputs))
        node = parent
    return node, tuple(reversed(views))


def _view_step(node: Node, inputs: Mapping[Node, int]) -> View:
    index: Any = None
    if node.target is operator.getitem:
        source: Any
        source, index = node.args
        node = source

    def slot_or_value(value: Node) -> Any:
        return Slot(inputs[value]) if value in inputs else value.meta["val"]

    value: Any = map_arg((node.args[1:], dict(node.kwargs)), slot_or_value)
    return View(node.target, (PARENT, *value[0]), value[1], index)
