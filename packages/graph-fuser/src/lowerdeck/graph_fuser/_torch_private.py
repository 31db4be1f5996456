"""Every use that this package makes of what is private in torch; each has a test of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _illegal_names
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY
from torch.fx.node import map_arg

__all__ = [
    "OpOverload",
    "OpOverloadPacket",
    "add_node",
    "copy_node",
    "defer_code",
    "erase_nodes_now",
    "generate_code",
    "is_impure",
    "lazy_graph_module",
    "mark_impure",
    "mend_readers",
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


def is_impure(module: object) -> bool:
    """Return whether dead code elimination keeps calls of ``module``."""
    return bool(getattr(module, "_is_impure", False))


def mark_impure(module: GraphModule) -> None:
    """Keep dead code elimination from removing calls of ``module``, in copies of it too."""
    attributes = module.meta.setdefault(_USER_PRESERVED_ATTRIBUTES_KEY, {})
    attributes["_is_impure"] = True
    module._is_impure = True  # type: ignore[assignment]


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
    if isinstance(module, _LazyGraphModule):
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
        if isinstance(inner, _LazyGraphModule):
            inner.real_recompile()
        elif isinstance(inner, GraphModule) and "recompile" in vars(type(inner)):
            inner.recompile()


def add_node(
    graph: Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...],
    name: str,
    type_expr: Any = None,
) -> Node:
    """Add a node at the insert point of ``graph``, as ``Graph.create_node`` does but faster.

    ``Graph.create_node`` flattens all arguments to look for raw symbolic numbers; the caller
    passes none.

    Args:
        graph: The graph.
        op: The kind of node.
        target: What it calls or reads.
        args: Positional arguments.
        name: The name wanted; it gets a number if it is taken.
        type_expr: The type of its value, where that is known.
    """
    if graph._owning_module is not None:
        # Hooks of the owner want to hear of it.
        return graph.create_node(op, target, args, {}, name, type_expr)
    return _append(graph, Node(graph, _free_name(graph, name), op, target, args, {}, type_expr))


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
    free = _free_name(graph, node.name if name is None else name)
    copy = _append(graph, Node(graph, free, node.op, node.target, args, kwargs, node.type))
    # Filled, not replaced: setting an attribute of a node looks the node up in its graph.
    copy.meta.update(node.meta if meta is None else meta)
    return copy


def _free_name(graph: Graph, name: str) -> str:
    """Return ``name``, or one like it that is legal and free: what torch returns, but faster."""
    namespace = graph._graph_namespace
    is_legal = name.isidentifier() and name.isascii() and name not in _illegal_names
    if not is_legal or name in namespace._used_names:
        return namespace.create_name(name, None)
    namespace._used_names.add(name)
    return name


def _append(graph: Graph, node: Node) -> Node:
    graph._graph_namespace._obj_to_name[node] = node.name
    graph._insert(node)
    # Graph.find_nodes looks functions up by what they call, other nodes by their kind alone.
    op = node.op
    key = (op, node.target if op == "call_function" else None)
    graph._find_nodes_lookup_table.table[key][node] = None
    graph._len += 1
    return node


def mend_readers(graph: Graph) -> None:
    """Enter every node among the users of what it reads.

    ``torch.export`` (2.13) leaves some out where a value made under ``no_grad`` is read once more
    behind a write. Whoever goes by users alone loses those edges.

    Args:
        graph: The graph; nothing changes where it is whole.
    """
    for node in graph.nodes:
        for source in node._input_nodes:
            if node not in source.users:
                source.users[node] = None


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
