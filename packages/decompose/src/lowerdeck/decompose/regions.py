"""Calls of higher-order operators, whose arguments are graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from lowerdeck.decompose._torch_private import WRITING_CUSTOM, insert_assertions
from lowerdeck.decompose.calls.memory import Value
from lowerdeck.decompose.calls.template import facts_of
from lowerdeck.decompose.errors import WholeProgramError
from lowerdeck.decompose.walk import State, Walk
from lowerdeck.torch_base import SYMBOLS, attribute_of

_BODIES = frozenset({"cond", "while_loop", "map_impl", "scan", "associative_scan"})
_DELEGATE = "executorch_call_delegate"


class Regions:
    """What calls of higher-order operators become in one graph.

    Attributes:
        root: Holds the graphs that the new graph refers to.
    """

    def __init__(self) -> None:
        self.root: torch.nn.Module = torch.nn.Module()
        self._names: dict[torch.nn.Module, str] = {}

    def attribute(self, gm: GraphModule, node: Node) -> Any:
        """Return what a get_attr node is: a module.

        Args:
            gm: The module that holds it.
            node: The node.

        Raises:
            WholeProgramError: It is anything else.
        """
        held = attribute_of(gm, node)
        if isinstance(held, torch.nn.Module):
            return held
        raise WholeProgramError(f"{node.name!r} reads an attribute of type {type(held).__name__}")

    def call(self, walk: Walk, node: Node, args: Any, kwargs: Any) -> Any:
        """Return what a call of a higher-order operator has become.

        Args:
            walk: The walk that it is met in.
            node: The call.
            args: Its arguments, as values.
            kwargs: Its keywords.

        Raises:
            WholeProgramError: The operator is not one of those that are known.
        """
        target: Any = node.target
        name = str(target.__name__)
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *given = args
            return _inlined(walk, body, given, _grad(enabled))
        if name == "wrap_with_autocast":
            *mode, body = args[:5]
            return _inlined(walk, body, args[5:], _autocast(*mode))
        if name == _DELEGATE:
            return walk.copy_unchanged(
                node, self._registered(walk, node, args, lambda held: held), kwargs
            )
        if target is WRITING_CUSTOM:
            return walk.copy_unchanged(node, args, kwargs)
        if name not in _BODIES:
            raise WholeProgramError(f"{node.name!r} calls the higher-order operator {target}")
        operands = list(_leaves(args[1:] if name == "cond" else args))
        return walk.copy_unchanged(
            node,
            self._registered(walk, node, args, lambda body: _body(walk, body, operands)),
            kwargs,
        )

    def _registered(
        self, walk: Walk, node: Node, args: Any, made: Callable[[Any], torch.nn.Module]
    ) -> tuple[Any, ...]:
        """Return arguments with nodes that refer to the new graphs."""
        found = []
        for source, held in zip(node.args, args, strict=True):
            if not isinstance(held, torch.nn.Module):
                found.append(held)
                continue
            name = self._names.get(held, "")
            if not name:
                name = own = str(source.target)  # type: ignore[union-attr]
                number = 1
                # An inlined region may hold another module by a name of the graph around it.
                while hasattr(self.root, name):
                    name, number = f"{own}_{number}", number + 1
                self.root.add_module(name, made(held))
                self._names[held] = name
            reference = walk.writer.graph.create_node("get_attr", name, name=name)
            reference.meta = walk.inherited_meta(node).meta()
            found.append(reference)
        return tuple(found)


def _inlined(walk: Walk, body: GraphModule, given: Any, state: State) -> Any:
    """Return what a region gives whose calls stand in the graph itself."""
    placeholders = body.graph.find_nodes(op="placeholder")
    inner = Walk(walk.writer, walk.templates, walk.regions, (*walk.state, *state))
    return inner.run(body, dict(zip(placeholders, given, strict=True)))


def _grad(enabled: bool) -> State:
    if not enabled:
        # All is traced so.
        return ()

    def enter() -> AbstractContextManager[Any]:
        return torch.enable_grad()

    return ((("grad", True), enter),)


def _autocast(device: str, dtype: Any, enabled: bool, cache_enabled: Any) -> State:
    def enter() -> AbstractContextManager[Any]:
        return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    return ((("autocast", device, dtype, enabled, cache_enabled), enter),)


def _body(walk: Walk, body: Any, operands: list[Any]) -> GraphModule:
    """Return a graph that a higher-order operator is given, decomposed."""
    placeholders = body.graph.find_nodes(op="placeholder")
    inner = walk.nested(Graph(), Regions())
    env = {
        node: inner.placeholder(node, requires_grad=_requires_grad(walk, node, operand))
        for node, operand in zip(placeholders, operands, strict=True)
    }
    given = [value for value in env.values() if isinstance(value, Value)]
    results = inner.run(body, env)
    last = body.graph.output_node()
    # Control flow passes values: torch refuses mutated and aliased inputs of branches.
    if any(value.memory.generation for value in given):
        raise WholeProgramError("a region writes what it is given")
    memories = {id(value.memory) for value in given}
    if any(isinstance(each, Value) and id(each.memory) in memories for each in _leaves(results)):
        raise WholeProgramError("a region returns what it is given, or a view of it")
    inner.writer.graph.output(inner.read(results)).meta.update(last.meta)
    inner.writer.graph.eliminate_dead_code()
    made = GraphModule(inner.regions.root, inner.writer.graph)
    made.meta.update(body.meta)
    if inner.writer.is_dynamic:
        insert_assertions(made, export=False)
        made.recompile()
    return made


def _requires_grad(walk: Walk, node: Node, operand: Any) -> bool:
    """Return whether a region is given what requires gradients."""
    if not isinstance(operand, Value):
        return False
    known = walk.writer.facts(operand.node)
    # Slices and what a loop carries are regenerated, and so require no gradients.
    return bool(known.requires_grad and facts_of(node.meta["val"]).shape == known.shape)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (tuple, list)):
        for each in tree:
            yield from _leaves(each)
    elif isinstance(tree, (Value, Node, int, float, bool, *SYMBOLS)):
        yield tree
