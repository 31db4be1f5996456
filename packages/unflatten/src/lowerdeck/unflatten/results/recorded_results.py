"""Of which results of calls the code around a changed module was recorded for these alone.

Whatever that code asks of a result (a size, the rank, a type, how many there are) the program has
as it was when it was recorded: as a number, as a branch that it took, as how often a loop ran. It
does not tell which of these is there. So once a module was changed, what it returns must be as it
was recorded, unless nothing is computed after it and the code around it returns it alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import Graph, Node

from lowerdeck.torch_base import pytree, source_frames
from lowerdeck.unflatten._torch_private import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_MODE
from lowerdeck.unflatten.calls.carrying import must_hand_through
from lowerdeck.unflatten.calls.signature import flatten_like
from lowerdeck.unflatten.code import TORCH_FOLDER, Check, split_call_target, told
from lowerdeck.unflatten.results.result_check import (
    Expected,
    Given,
    NumberCheck,
    ResultCheck,
    Sizes,
    sizes_of,
)
from lowerdeck.unflatten.results.returned import RETURNS, StructureCheck
from lowerdeck.unflatten.results.size_texts import SizeTexts
from lowerdeck.unflatten.sizes.checks import must_be_sizes
from lowerdeck.unflatten.sizes.guards import SizeGuards, SizeLimits

_COMPUTES_NOTHING = frozenset(
    {
        *(getitem, flatten_like, pytree.tree_unflatten, torch.ops.aten.alias.default),
        *(must_hand_through, must_be_sizes),
        *(SET_GRAD_MODE, ENTER_AUTOCAST, EXIT_AUTOCAST),
    }
)
_STEPS = {"call_function", "call_method", "call_module"}
_HANDS_ON = "torch.nn.modules.container.Sequential"
"""Its code hands what one module returns to the next, and asks nothing."""


def result_checks(
    graph: Graph,
    guards: SizeGuards,
    type_name: str | None,
    others: Sequence[Graph] = (),
    written: int = 0,
) -> dict[Node, Check]:
    """Return how results of calls are to be checked.

    Args:
        graph: The graph of one form of a module.
        guards: What sizes that vary must meet.
        type_name: The qualified name of the module's class.
        others: The graphs of more calls that run the same code, with results of other sizes or
            types.
        written: How many of the first values that the graph returns are written into state.
    """
    found: dict[Node, Check] = {}
    calls = graph.find_nodes(op="call_module")
    if not calls:
        return found
    place = {node: number for number, node in enumerate(graph.nodes)}
    output = next(iter(graph.find_nodes(op="output")))
    is_handing_on = type_name == _HANDS_ON
    last = _last_step(graph, _STEPS - {"call_module"} if is_handing_on else _STEPS)
    returned = _returned_alone(output, written)
    results = _results(graph, guards)
    several = [(graph, results)]
    for other in others:
        found_there = _results(other, guards, graph)
        if len(found_there) == len(results):
            several.append((other, found_there))
    for number, result in enumerate(results):
        is_last = last is None or place[result.call] >= place[last]
        if is_last and (is_handing_on or result.node in returned):
            continue
        check = _check(_where(last or output), [(one, each[number]) for one, each in several])
        if check is not None:
            found[result.node] = check
    for call in calls:
        path, _ = split_call_target(str(call.target))
        for node in (call, *call.users):
            whole = node.meta.get(RETURNS)
            if whole is not None:
                found[node] = StructureCheck(path, whole)
    return found


def _last_step(graph: Graph, kinds: set[str]) -> Node | None:
    """Return the last step of these kinds that computes something; None if there is none."""
    steps = (node for node in reversed(graph.nodes) if node.op in kinds)
    return next((node for node in steps if node.target not in _COMPUTES_NOTHING), None)


def _returned_alone(output: Node, written: int) -> set[Node]:
    """Return what the code returns once, if it returns values of tensors alone.

    A number beside them may be a size of one, as may how often one is there.

    Args:
        output: What it returns.
        written: How many of the first are written into state.
    """
    leaves = _leaves(output.args[0])[written:]
    nodes = [_origin(leaf) for leaf in leaves if isinstance(leaf, Node)]
    if len(nodes) + sum(leaf is None for leaf in leaves) < len(leaves):
        return set()
    if not all(isinstance(sizes_of(node), Sizes) for node in nodes):
        return set()
    return {node for node, count in Counter(nodes).items() if count == 1}


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, dict):
        return _leaves(list(value.values()))
    return [value]


def _origin(node: Node) -> Node:
    while node.target is torch.ops.aten.alias.default:
        node = node.all_input_nodes[0]
    return node


@dataclass(frozen=True, slots=True)
class _Result:
    """A tensor or a number that a call returned, or that is taken out of that.

    Attributes:
        node: It.
        call: The call.
        sizes: Its sizes, or the number.
        told: The text of each that varies, where something tells it when the call returns.
        guards: What sizes that vary must meet.
    """

    node: Node
    call: Node
    sizes: Sizes | sympy.Basic
    told: Mapping[int, str]
    guards: SizeGuards

    def limits(self) -> SizeLimits | None:
        """Return what its sizes must meet where it alone tells one: of what was found, say."""
        varying = list(_varying(self.sizes))
        if len(self.told) == len(varying):
            return None
        return self.guards.limits([((0, dim), size) for dim, size in varying])


def _results(graph: Graph, guards: SizeGuards, known: Graph | None = None) -> list[_Result]:
    """Return what the calls of a graph return.

    Args:
        graph: The graph.
        guards: What sizes that vary must meet.
        known: A graph of the same code, whose names the texts are to have.
    """
    order = list(graph.nodes)
    named = order if known is None else list(known.nodes)
    if len(named) != len(order):
        return []
    place = {node: number for number, node in enumerate(order)}
    names = {node.name: f"{{{same.name}}}" for node, same in zip(order, named, strict=True)}
    texts = SizeTexts(order)
    found: list[_Result] = []
    for call in graph.find_nodes(op="call_module"):
        queue = [call]
        for node in queue:
            sizes = sizes_of(node)
            if not isinstance(sizes, (Sizes, sympy.Basic)):
                queue += [user for user in node.users if user.target in (getitem, flatten_like)]
                continue
            told = {
                dim: text.format_map(names)
                for dim, size in _varying(sizes)
                if (text := texts.of(size, place[node])) is not None
            }
            found.append(_Result(node, call, sizes, told, guards))
    return found


def _varying(sizes: Sizes | sympy.Basic) -> Iterator[tuple[int, sympy.Basic]]:
    """Yield the sizes that vary, with their dimensions; a number counts as one."""
    shape = sizes.shape if isinstance(sizes, Sizes) else (sizes,)
    for dim, size in enumerate(shape):
        if isinstance(size, sympy.Basic):
            yield dim, size


def _check(where: str, several: Sequence[tuple[Graph, _Result]]) -> Check | None:
    """Return the check of a result.

    Args:
        where: What is computed after it.
        several: It, and what further calls of the same code returned, with the graphs of these.
    """
    results = [result for _, result in several]
    path, _ = split_call_target(str(results[0].call.target))
    texts = list(dict.fromkeys(text for result in results for text in result.told.values()))
    if not isinstance(results[0].sizes, Sizes):
        is_told = all(result.told for result in results)
        return NumberCheck(path, where, tuple(texts)) if is_told else None
    given = _given(several[0][0]) if len(several) > 1 else ()
    expected: dict[Any, dict[Expected, None]] = {}
    for graph, result in several:
        if isinstance(result.sizes, Sizes):
            sizes = result.sizes.shape
            shape = [None if isinstance(size, sympy.Basic) else size for size in sizes]
            known = [(dim, texts.index(text)) for dim, text in result.told.items()]
            made = Expected(tuple(shape), result.sizes.dtype, tuple(known), result.limits())
            key = tuple(sizes for _, sizes in _given(graph)) if given else ()
            expected.setdefault(key, {})[made] = None
    names = [f"{{{node.name}}}" for node, _ in given]
    found = {key: tuple(each) for key, each in expected.items()}
    return ResultCheck(path, where, found, (*texts, *names), len(texts))


def _given(graph: Graph) -> list[tuple[Node, Given]]:
    """Return the tensors that a graph is given, with the sizes that do not vary."""
    found: list[tuple[Node, Given]] = []
    for node in graph.find_nodes(op="placeholder"):
        sizes = sizes_of(node)
        if isinstance(sizes, Sizes):
            shape = [None if isinstance(size, sympy.Basic) else size for size in sizes.shape]
            found.append((node, tuple(shape)))
    return found


def _where(node: Node | None) -> str:
    frames = source_frames(node) if node is not None else []
    own = [one for one in frames if not one.file.startswith(TORCH_FOLDER)]
    return told((own or frames)[-1]) if frames else ""
