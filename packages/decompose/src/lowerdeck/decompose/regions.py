"""Calls of higher-order operators, whose arguments are subgraphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from lowerdeck.decompose._torch_private import WRITING_CUSTOM, insert_assertions
from lowerdeck.decompose.calls.memory import Value
from lowerdeck.decompose.errors import WholeProgramError
from lowerdeck.decompose.recording import eliminate_dead_code
from lowerdeck.decompose.walk import State, Walk
from lowerdeck.decompose.writer import Writer
from lowerdeck.torch_base import attribute_of, pytree

_CONTROL_FLOW = frozenset({"cond", "while_loop", "map_impl", "scan", "associative_scan"})
_DELEGATE = "executorch_call_delegate"
# The default of traces is no_grad.
_GRAD: State = ((("grad", True), torch.enable_grad),)


class Regions:
    """Converter of calls of higher-order operators in one graph.

    Attributes:
        root: Module that owns the subgraphs.
    """

    def __init__(self) -> None:
        self.root: torch.nn.Module = torch.nn.Module()
        self._names: dict[torch.nn.Module, str] = {}

    def attribute(self, gm: GraphModule, node: Node) -> Any:
        """Return the module of a get_attr node.

        Args:
            gm: Graph module of the node.

        Raises:
            WholeProgramError: The attribute is not a module.
        """
        value = attribute_of(gm, node)
        if isinstance(value, torch.nn.Module):
            return value
        raise WholeProgramError(f"{node.name!r} reads an attribute of type {type(value).__name__}")

    def call(self, walk: Walk, node: Node, args: Any, kwargs: Any) -> Any:
        """Return the result of a higher-order call in the new graph.

        Args:
            walk: Converter of the graph of the call.
            node: A call of the original graph.
            args: Trees of values, nodes and constants.

        Raises:
            WholeProgramError: The operator is not supported.
        """
        target: Any = node.target
        name = str(target.__name__)
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *operands_of_body = args
            return _inlined(walk, body, operands_of_body, _GRAD if enabled else ())
        if name == "wrap_with_autocast":
            *mode, body = args[:5]
            device, dtype, enabled, cache_enabled = mode
            enter = partial(
                torch.autocast, device, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled
            )
            return _inlined(walk, body, args[5:], ((("autocast", *mode), enter),))
        if name not in _CONTROL_FLOW and name != _DELEGATE and target is not WRITING_CUSTOM:
            raise WholeProgramError(f"{node.name!r} calls the higher-order operator {target}")
        # Lowered modules are unchanged.
        convert = partial(_body, walk) if name in _CONTROL_FLOW else lambda module: module
        arguments = self._registered(walk, node, args, convert)
        return walk.copy_unchanged(node, arguments, kwargs)

    def _registered(
        self, walk: Walk, node: Node, args: Any, convert: Callable[[Any], torch.nn.Module]
    ) -> tuple[Any, ...]:
        """Return arguments with get_attr nodes for the new subgraphs."""
        new_args = []
        for source, value in zip(node.args, args, strict=True):
            if not isinstance(value, torch.nn.Module):
                new_args.append(value)
                continue
            name = self._names.get(value, "")
            if not name:
                name = base = str(source.target)  # type: ignore[union-attr]
                number = 1
                # Inlined regions may have other modules of the same name.
                while hasattr(self.root, name):
                    name, number = f"{base}_{number}", number + 1
                self.root.add_module(name, convert(value))
                self._names[value] = name
            reference = walk.writer.graph.create_node("get_attr", name, name=name)
            reference.meta = walk.inherited_meta(node).meta()
            new_args.append(reference)
        return tuple(new_args)


def _inlined(walk: Walk, body: GraphModule, operands: Any, state: State) -> Any:
    """Return the results of an inlined region."""
    placeholders = body.graph.find_nodes(op="placeholder")
    inner = Walk(walk.writer, walk.templates, walk.regions, (*walk.state, *state))
    return inner.run(body, dict(zip(placeholders, operands, strict=True)))


def _body(walk: Walk, body: Any) -> GraphModule:
    """Return a decomposed subgraph."""
    placeholders = body.graph.find_nodes(op="placeholder")
    writer = Writer(Graph(), walk.templates.mode)
    inner = Walk(writer, walk.templates, Regions(), walk.state)
    env = {node: inner.placeholder(node) for node in placeholders}
    inputs = [value for value in env.values() if isinstance(value, Value)]
    results = inner.run(body, env)
    last = body.graph.output_node()
    # torch rejects control flow with mutated or aliased inputs.
    if any(value.memory.generation for value in inputs):
        raise WholeProgramError("a region writes its input")
    memories = {id(value.memory) for value in inputs}
    leaves = pytree.tree_leaves(results)
    if any(isinstance(leaf, Value) and id(leaf.memory) in memories for leaf in leaves):
        raise WholeProgramError("a region returns its input, or a view of it")
    inner.writer.graph.output(inner.read(results)).meta.update(last.meta)
    eliminate_dead_code(inner.writer.graph)
    new_body = GraphModule(inner.regions.root, inner.writer.graph)
    new_body.meta.update(body.meta)
    if inner.writer.is_dynamic:
        insert_assertions(new_body, inner.writer.fixed.values(), export=False)
        new_body.recompile()
    return new_body
