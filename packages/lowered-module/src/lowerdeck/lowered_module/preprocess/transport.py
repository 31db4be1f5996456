"""Send a partition to another process, have it preprocessed there, and bring the result back."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from lowerdeck.lowered_module.authoring.backend import PreprocessResult, with_plain_bytes
from lowerdeck.lowered_module.errors import PreprocessError
from lowerdeck.lowered_module.preprocess.weights import SentWeight, put_back, taken_out
from lowerdeck.lowered_module.program.debug_handles import HANDLE
from lowerdeck.lowered_module.program.tags import AHEAD
from lowerdeck.torch_base import graphs_of, is_getitem, reserve_name

# torch.export.save and load keep what they are doing in globals.
_one_at_a_time = threading.Lock()

_RESULT = "_operator.getitem"
_KEPT = (AHEAD, HANDLE, "custom")


@dataclass(frozen=True, slots=True)
class _NodeIndex:
    """Stands for a node, by its index in its graph."""

    number: int


@dataclass(frozen=True, slots=True)
class _SentNode:
    """A node as it was sent: what torch's own format does not keep, or not exactly."""

    op: str
    target: str
    name: str
    argument: str
    meta: Mapping[str, Any]
    args: Any
    kwargs: Any


@dataclass(frozen=True, slots=True)
class Parcel:
    """A partition as bytes, with what torch's own format leaves out.

    Attributes:
        program: The partition in the format of ``torch.export.save``, without its weights.
        weights: What ``SharedWeights`` can send by another way.
        graphs: The nodes of each graph, in order. Torch's format makes lists of tuples, keeps not
            all of the user's metadata, joins results that are taken twice, and adds those that
            nobody takes.
        backend: The backend class.
        compile_specs: What the backend is told.
    """

    program: bytes
    weights: tuple[SentWeight, ...]
    graphs: tuple[tuple[_SentNode, ...], ...]
    backend: Any
    compile_specs: list[Any]


def pack(program: ExportedProgram, backend: Any, compile_specs: list[Any]) -> Parcel:
    """Return ``program`` ready to travel.

    Args:
        program: The partition.
        backend: Its backend class; the other side must be able to import it.
        compile_specs: What the backend is told.

    Raises:
        PreprocessError: torch cannot write the program, because it holds delegates, say.
    """
    stream = io.BytesIO()
    without, weights = taken_out(program)
    try:
        with _one_at_a_time, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.save(without, stream)
    except Exception as error:
        raise PreprocessError(
            f"a partition cannot be sent to an executor: torch.export.save says {error}. Lower "
            "without an executor"
        ) from error
    graphs = tuple(_nodes_of(gm) for gm in graphs_of(program.graph_module))
    return Parcel(stream.getvalue(), weights, graphs, backend, compile_specs)


def preprocess_parcel(parcel: Parcel) -> PreprocessResult:
    """Return what the backend makes of a parcel; runs in the other process.

    Args:
        parcel: From ``pack``.

    Raises:
        PreprocessError: The program did not arrive as it was sent.
        Exception: Whatever the backend raises.
    """
    with _one_at_a_time, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.load(io.BytesIO(parcel.program))
    put_back(program, parcel.weights)
    graphs = list(graphs_of(program.graph_module))
    if len(graphs) != len(parcel.graphs):
        raise _arrived_otherwise(f"{len(parcel.graphs)} graphs were sent, {len(graphs)} arrived")
    for gm, sent in zip(graphs, parcel.graphs, strict=True):
        _make_as_sent(gm, sent)
    return with_plain_bytes(parcel.backend.preprocess(program, parcel.compile_specs))


def _nodes_of(graph_module: GraphModule) -> tuple[_SentNode, ...]:
    index_of = {node: number for number, node in enumerate(graph_module.graph.nodes)}

    def named(value: object) -> object:
        return _NodeIndex(index_of[value]) if isinstance(value, Node) else value

    return tuple(
        _SentNode(
            node.op,
            _target_name(node),
            node.name,
            str(node.target) if node.op == "placeholder" else "",
            {key: node.meta[key] for key in _KEPT if node.meta.get(key) is not None},
            *map_aggregate((node.args, node.kwargs), named),  # type: ignore[arg-type]
        )
        for node in graph_module.graph.nodes
    )


def _target_name(node: Node) -> str:
    """Return what two processes call a function alike, and nothing of modules and inputs."""
    if node.op != "call_function":
        return ""
    # Plain functions show their address as text.
    target = node.target
    return str(target) if callable(getattr(target, "name", None)) else _of_python(target)


def _of_python(target: Any) -> str:
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _make_as_sent(graph_module: GraphModule, sent: Sequence[_SentNode]) -> None:
    """Give a graph that was loaded the nodes, their order and all that it had when it was sent."""
    graph = graph_module.graph
    found = _matched(graph, sent)

    def arrived(value: object) -> object:
        return found[value.number] if isinstance(value, _NodeIndex) else value

    for before, node in pairwise(found):
        if before.next is not node:
            before.append(node)
    for node, was in zip(found, sent, strict=True):
        node.args, node.kwargs = map_aggregate((was.args, was.kwargs), arrived)  # type: ignore[arg-type]
        if was.argument:
            node.target = was.argument  # loading takes the node's name for it
        node.meta.update(was.meta)
    kept = set(found)
    for node in reversed(graph.nodes):
        if node not in kept:
            graph.erase_node(node)
    for node, was in zip(found, sent, strict=True):
        if node.name != was.name:
            # Node._rename would add a number to a name that was ever used in the graph.
            reserve_name(graph, was.name)
            node.name = was.name
    graph_module.recompile()


def _matched(graph: Graph, sent: Sequence[_SentNode]) -> list[Node]:
    """Return the node of the graph for each that was sent.

    Operators keep their order. A result of an operator of several is known by its place among
    them: loading makes all of them, right behind the operator, and each once.
    """
    others = [node for node in graph.nodes if not is_getitem(node)]
    results = {node.args[:2]: node for node in graph.nodes if is_getitem(node)}
    taken: set[Node] = set()
    original: dict[Node, Node] = {}
    found: list[Node] = []
    waiting = iter(others)
    for number, was in enumerate(sent):
        if was.target == _RESULT:
            source = found[was.args[0].number]
            node = results.get((original.get(source, source), was.args[1]))
        else:
            node = next(waiting, None)
        if node is None or (node.op, _target_name(node)) != (was.op, was.target):
            raise _arrived_otherwise(
                f"node {number}, {was.name}, was sent as {was.op} {was.target} and arrived as "
                f"{'nothing' if node is None else f'{node.op} {_target_name(node)}'}"
            )
        if node in taken:
            again = graph.node_copy(node)
            original[again] = node
            node = again
        taken.add(node)
        found.append(node)
    more = next(waiting, None)
    if more is not None:
        raise _arrived_otherwise(f"{more.op} {_target_name(more)} arrived and was not sent")
    return found


def _arrived_otherwise(difference: str) -> PreprocessError:
    return PreprocessError(
        f"a partition arrived otherwise than it was sent: {difference}. Use the same torch on "
        "both sides, or lower without an executor"
    )
