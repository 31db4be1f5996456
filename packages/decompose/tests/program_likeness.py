"""Compare programs, up to names and the order of independent nodes, and their results."""

from __future__ import annotations

import copy
import operator
import re
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from lowerdeck.decompose import decompose


def targets(program: ExportedProgram) -> list[Any]:
    """Return what the calls of the outermost graph call, in order."""
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


def assert_as_eager(
    module: nn.Module, *args: torch.Tensor, calls: int = 2, shapes: Any = None, **options: Any
) -> ExportedProgram:
    """Decompose a module's program, and compare its results, inputs and state with eager's.

    Args:
        module: The module; not changed.
        args: Example inputs; each call gets copies, on which the program may write.
        calls: How many calls, one after the other.
    """
    eager = copy.deepcopy(module)
    program = torch.export.export(
        copy.deepcopy(module), tuple(arg.clone() for arg in args), dynamic_shapes=shapes
    )
    found = decompose(program, **options)
    own = found.module()
    for _ in range(calls):
        given, theirs = ([arg.clone() for arg in args] for _ in range(2))
        results = [pytree.tree_leaves(own(*given)), pytree.tree_leaves(eager(*theirs))]
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)
        torch.testing.assert_close(given, theirs, equal_nan=True)
    held = dict(own.named_buffers())
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(held[name], buffer, equal_nan=True)
    return found


def differences(found: ExportedProgram, expected: ExportedProgram) -> list[str]:
    """Return in what two programs differ; nothing where they are alike."""
    inputs = [_inputs(program) for program in (found, expected)]
    outputs = [_outputs(program) for program in (found, expected)]
    said = []
    if Counter(inputs[0].values()) != Counter(inputs[1].values()):
        said.append(f"inputs: {_counts(inputs[0].values(), inputs[1].values())}")
    graphs = [
        _Numbered(program.graph_module, given)
        for program, given in zip((found, expected), inputs, strict=True)
    ]
    said += _unlike(graphs[0], graphs[1])
    for each, other in zip(*outputs, strict=False):
        if each[:2] != other[:2]:
            said.append(f"outputs: {each[:2]} for {other[:2]}")
    if len(outputs[0]) != len(outputs[1]):
        said.append(f"{len(outputs[0])} outputs for {len(outputs[1])}")
    if said:
        return said
    for (kind, target, node), (_, _, other) in zip(*outputs, strict=True):
        if graphs[0].of(node) != graphs[1].of(other):
            said.append(f"output {kind} {target}: {node} for {other}")
    return said


def _inputs(program: ExportedProgram) -> dict[Node, Any]:
    placeholders = program.graph.find_nodes(op="placeholder")
    specs = program.graph_signature.input_specs
    return {
        node: (spec.kind.name, str(spec.target or node.name), _value(node.meta.get("val")))
        for node, spec in zip(placeholders, specs, strict=True)
    }


def _outputs(program: ExportedProgram) -> list[tuple[str, str, Any]]:
    nodes = program.graph.output_node().args[0]
    specs = program.graph_signature.output_specs
    found = [
        (spec.kind.name, str(spec.target), node) for node, spec in zip(nodes, specs, strict=True)
    ]
    # The order of mutations is that of the inputs, which nothing depends on.
    mutations = sorted((f for f in found if "MUTATION" in f[0]), key=lambda f: f[:2])
    return mutations + [f for f in found if "MUTATION" not in f[0]]


# Torch's retrace may turn numbers round, which are the same then.
_COMMUTATIVE = frozenset({torch.sym_min, torch.sym_max, operator.add, operator.mul})
# Strides that are smaller for sizes of 0 only, which torch's retrace writes in some views.
_SMALLER_IF_EMPTY = re.compile(r"Min\((\d+), \1\*\w+\)")


class _Numbered:
    """A graph with equal numbers for nodes that compute the same."""

    def __init__(self, gm: GraphModule, given: dict[Node, Any]) -> None:
        self.keys: dict[Node, Any] = {}
        self.count: Counter[Any] = Counter()
        self.gm = gm
        self.shown: dict[Any, str] = {}
        self.needed: set[Any] = set()
        alive = _alive(gm)
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                self.keys[node] = hash(("placeholder", given[node]))
            elif node.op == "get_attr":
                self.keys[node] = hash(("get_attr", _attribute(gm, node)))
            elif node.op != "output":
                args = self.of(_compared(node))
                if node.target in _COMMUTATIVE:
                    args = tuple(sorted(args, key=str))
                parts = (
                    str(node.target),
                    args,
                    self.of(dict(node.kwargs)),
                    _value(node.meta.get("val")),
                )
                self.keys[node] = hash(parts)
                self.count[self.keys[node]] += 1
                if node in alive:
                    self.needed.add(self.keys[node])
                self.shown[self.keys[node]] = f"{node.format_node()} : {parts[3]}"

    def of(self, tree: Any) -> Any:
        if isinstance(tree, Node):
            return self.keys[tree]
        if isinstance(tree, (list, tuple)):
            return tuple(map(self.of, tree))
        if isinstance(tree, dict):
            return tuple(sorted((name, self.of(value)) for name, value in tree.items()))
        if isinstance(tree, torch.SymInt):
            return str(tree)
        # Messages name nodes.
        return (type(tree).__name__, str(tree).partition(" on node ")[0])


def _alive(gm: GraphModule) -> set[Node]:
    """Return what outputs or effects need, through any number of nodes."""
    alive: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        if node in alive or node.op == "output" or node.is_impure():
            alive.add(node)
            map_arg((_compared(node), node.kwargs), alive.add)
    return alive


def _compared(node: Node) -> Any:
    """Return a node's arguments, but of a view the tensor alone: its result has the sizes.

    torch multiplies merged sizes where a view may find one by itself.
    """
    return node.args[:1] if node.target is torch.ops.aten.view.default else node.args


def _attribute(gm: GraphModule, node: Node) -> Any:
    value = gm
    for atom in str(node.target).split("."):
        value = getattr(value, atom)
    if isinstance(value, GraphModule):
        given = {
            each: (index, _value(each.meta.get("val")))
            for index, each in enumerate(value.graph.find_nodes(op="placeholder"))
        }
        inner = _Numbered(value, given)
        return inner.of(value.graph.output_node().args), tuple(sorted(inner.count.items()))
    return str(type(value))


def _value(value: Any) -> Any:
    """Return what a value is, in words."""

    def said(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            strided = leaf.layout is torch.strided
            numbers = map(str, leaf.stride()) if strided else (str(leaf.layout),)
            stride = tuple(_SMALLER_IF_EMPTY.sub(r"\1", number) for number in numbers)
            return (tuple(map(str, leaf.shape)), stride, str(leaf.dtype), str(leaf.device))
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return str(leaf)
        return str(leaf)

    return tuple(map(said, pytree.tree_leaves(value)))


def _counts(found: Any, expected: Any) -> str:
    one, other = Counter(found), Counter(expected)
    return f"too many {list((one - other).elements())}, too few {list((other - one).elements())}"


def _unlike(found: _Numbered, expected: _Numbered) -> list[str]:
    # torch makes some views anew that are as they were: fewer of the same are no difference.
    more = [found.shown[key] for key in (found.count - expected.count)]
    # It also leaves some nodes that nothing needs any more.
    less = [
        expected.shown[key]
        for key in expected.count
        if key not in found.count and key in expected.needed
    ]
    return [f"+ {line}" for line in more[:6]] + [f"- {line}" for line in less[:6]]
