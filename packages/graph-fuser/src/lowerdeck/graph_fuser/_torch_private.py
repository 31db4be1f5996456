"""Every use that this package makes of what is private in torch; each has its test."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY
from torch.fx.node import map_arg

from lowerdeck.torch_base import LazyGraphModule, add_node

__all__ = [
    "copy_node",
    "erase_nodes_now",
    "mark_impure",
    "nodes_by_callee",
    "reads_only_earlier",
    "defer_code",
    "generate_code",
    "lazy_graph_module",
    "replace_hooks",
    "share_codegen",
]

_DEFERRED = ("__reduce__", "__reduce_package__", "__str__", "code", "forward", "recompile")


def _no_code(self: GraphModule) -> None:
    """Generate nothing."""


def lazy_graph_module(class_name: str, graph: Graph) -> GraphModule:
    """Return a graph module around ``graph`` that generates its code at its first use.

    Args:
        class_name: Name of its class.
        graph: The graph; what it reads is to be installed in the module afterwards.
    """
    made = GraphModule.__new__(GraphModule)
    own = type(made)
    # The constructor would generate code; each graph module has a class of its own to hold it
    # back.
    own.recompile = _no_code  # type: ignore[assignment]
    GraphModule.__init__(made, {}, Graph(), class_name)
    del own.recompile
    made._graph = graph
    graph.owning_module = made
    defer_code(made)
    return made


def replace_hooks(module: torch.nn.Module | None) -> Sequence[Callable[..., object]]:
    """Return what is to be told, as ``hook(old, new name, user)``, of each input replaced."""
    hooks: Sequence[Callable[..., object]] = getattr(module, "_replace_hooks", ())
    return hooks


def share_codegen(source: Graph, target: Graph) -> None:
    """Let ``target`` generate its signature as ``source`` does (pytree inputs and outputs)."""
    target.set_codegen(source._codegen)


def defer_code(module: GraphModule) -> None:
    """Mark the code of ``module`` as stale: it is generated again at its next use, once.

    torch gives each graph module a class of its own to carry its ``forward``. The same class
    carries here what generates the code first, until ``recompile`` takes it away.

    Args:
        module: A graph module whose graph was edited.
    """
    if isinstance(module, LazyGraphModule):
        module.recompile()
        return
    own = type(module)
    if "recompile" in vars(own):
        return

    def recompile(self: GraphModule) -> Any:
        for name in _DEFERRED:
            if name in vars(own):
                delattr(own, name)
        return self.recompile()

    this = weakref.ref(module)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def generate() -> None:
        # A compiler that traces ``forward`` runs this as it is and goes on with the new code.
        due = this()
        if due is not None:
            recompile(due)

    def forward(self: GraphModule, *args: Any, **kwargs: Any) -> Any:
        generate()
        return self.forward(*args, **kwargs)

    def code(self: GraphModule) -> str:
        recompile(self)
        return self.code

    def text(self: GraphModule) -> str:
        recompile(self)
        return str(self)

    def reduce(self: GraphModule) -> Any:
        recompile(self)
        return self.__reduce__()

    def reduce_package(self: GraphModule, exporter: Any) -> Any:
        recompile(self)
        return self.__reduce_package__(exporter)

    namespace: dict[str, object] = {
        "recompile": recompile,
        "forward": forward,
        "code": property(code),
        "__str__": text,
        "__reduce__": reduce,
        "__reduce_package__": reduce_package,
    }
    for name, value in namespace.items():
        setattr(own, name, value)


def generate_code(module: torch.nn.Module) -> None:
    """Generate the code of ``module`` and of every graph module in it, where that is still due."""
    for inner in module.modules():
        if isinstance(inner, LazyGraphModule):
            inner.real_recompile()  # type: ignore[operator]
        elif isinstance(inner, GraphModule) and "recompile" in vars(type(inner)):
            inner.recompile()


def copy_node(
    graph: Graph,
    node: Node,
    env: Mapping[Node, Node],
    name: str | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Node:
    """Append a copy of ``node`` to ``graph``, as ``Graph.node_copy`` does, at a third of its cost.

    ``Graph.create_node`` flattens all arguments to look for raw symbolic numbers; a copy has none
    that its original did not have.

    Args:
        graph: The graph to append to; it must have no owner yet.
        node: A node of another graph.
        env: From the nodes that ``node`` reads to their copies.
        name: The name wanted; None for that of ``node``.
        meta: The meta of the copy; None for that of ``node``.
    """
    lookup = env.__getitem__
    args: Any = map_arg(node._args, lookup) if node._args else ()
    kwargs: Any = map_arg(node._kwargs, lookup) if node._kwargs else {}
    wanted = node.name if name is None else name
    copy = add_node(graph, node.op, node.target, args, wanted, kwargs, node.type)
    # Filled, not replaced: setting an attribute of a node looks the node up in its graph.
    copy.meta.update(node.meta if meta is None else meta)
    return copy


def erase_nodes_now(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erase ``nodes``, each without users when its turn comes, as ``Graph.erase_node`` does.

    Args:
        graph: The graph.
        nodes: Readers before what they read.
    """
    owner = graph.owning_module
    if owner is not None and getattr(owner, "_erase_node_hooks", None):
        for node in nodes:
            graph.erase_node(node)
        return
    forget = graph._find_nodes_lookup_table.remove
    count = 0
    for node in nodes:
        forget(node)
        node._remove_from_list()
        # Past Node.__setattr__, which would look the node up in its graph for every attribute.
        object.__setattr__(node, "_erased", True)
        node._update_args_kwargs((), {})
        count += 1
    graph._len -= count


def mark_impure(module: GraphModule) -> None:
    """Keep dead code elimination from removing calls of ``module``, in copies of it too."""
    attributes = module.meta.setdefault(_USER_PRESERVED_ATTRIBUTES_KEY, {})
    attributes["_is_impure"] = True
    module._is_impure = True  # type: ignore[assignment]


def nodes_by_callee(graph: Graph) -> Iterator[Collection[Node]]:
    """Yield the nodes that call one function, for each, and those that call methods or modules.

    fx keeps them so for ``find_nodes``, which must be told the function; finding out which there
    are would take a walk over all nodes.

    Args:
        graph: The graph, not to be changed meanwhile.
    """
    for (op, _), nodes in graph._find_nodes_lookup_table.table.items():
        if nodes and op.startswith("call_"):
            yield nodes


def reads_only_earlier(nodes: Sequence[Node]) -> bool:
    """Return whether each of ``nodes`` reads nothing but nodes before it among ``nodes``.

    It goes by what nodes read, which is right even where torch forgot readers, and which they hold
    in a dict: ``all_input_nodes`` would make a list of it for each.

    Args:
        nodes: Nodes of one graph, each once.
    """
    seen: dict[Node, None] = {}
    earlier = seen.keys()
    for node in nodes:
        if not node._input_nodes.keys() <= earlier:
            return False
        seen[node] = None
    return True
