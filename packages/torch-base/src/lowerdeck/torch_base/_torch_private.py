"""All uses of private names of torch in this package; each has a test."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch._decomp import _core_aten_decompositions_post_autograd
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._higher_order_ops.executorch_call_delegate import (
    executorch_call_delegate as _executorch_call_delegate,
)
from torch._ops import HigherOrderOperator, OperatorBase, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _illegal_names
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY
from torch.fx.node import map_arg
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    # What is re-exported from torch as it is
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "OperatorBase",
    "detect_fake_mode",
    "enable_python_dispatcher",
    "is_traceable_wrapper_subclass",
    "pytree",
]


_LARGEST = 2**31 - 1
_NO_BOUND = 2**62

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Types of numbers that are known only when a program runs."""

NormBase: type[torch.nn.Module] = _NormBase
"""The base class of batch and instance norms of all dimensions."""

LazyGraphModule: type[GraphModule] = _LazyGraphModule
"""A graph module that generates its code at its first call."""

# The same object, with a type that checkers need not infer.
executorch_call_delegate: HigherOrderOperator = _executorch_call_delegate
"""torch's operator that calls a lowered module (absent from ``torch.ops`` until imported)."""


@functools.cache
def core_decompositions() -> Mapping[OperatorBase, Callable[..., Any]]:
    """Return torch's decompositions to core ATen, without those of composite operators."""
    return dict(_core_aten_decompositions_post_autograd())


def reserve_name(graph: Graph, name: str) -> None:
    """Reserve a name in ``graph``, in place, as if a node had it."""
    graph._graph_namespace.create_name(name, None)


def schema_of(operator: OpOverload) -> torch.FunctionSchema:
    """Return the schema of one overload of an operator."""
    return operator._schema


def find_schema(target: object) -> torch.FunctionSchema | None:
    """Return the schema of one overload of an operator, of any dialect; None for anything else."""
    schema: torch.FunctionSchema | None = getattr(target, "_schema", None)
    return schema


def overload_name(operator: OpOverload) -> str:
    """Return the name of an overload, such as ``"Tensor"``; ``"default"`` when it has none."""
    name: str = operator._overloadname
    return name


@functools.cache
def composite_parts(operator: OpOverload) -> Callable[..., object] | None:
    """Return the function that computes ``operator`` by others; None if it is not composite."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    try:
        if not operator.has_kernel_for_dispatch_key(key):
            return None
    except RuntimeError:
        return None  # Some overloads exist for TorchScript only.
    # ``decompose`` would ask for Python's version first, which the caller may have replaced.
    return functools.partial(operator._op_dk, key)


def is_impure(module: object) -> bool:
    """Return whether dead code elimination keeps calls of ``module``."""
    return bool(getattr(module, "_is_impure", False))


def data_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's first element, for reading only; 0 without memory.

    ``Tensor.data_ptr()`` is for writing too, and so turns a lazy clone into a real one.
    """
    try:
        start: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]  # not in its stubs
    except (NotImplementedError, RuntimeError):
        return 0
    return start and start + int(tensor.storage_offset()) * tensor.element_size()


def storage_identity(tensor: torch.Tensor) -> int | None:
    """Return the identity of a tensor's storage while it lives; None without one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        # Sparse tensors and some subclasses have no storage.
        return None


def shared_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy that shares memory until one side writes, or None where that cannot be.

    torch then takes new memory from the allocator of the storage. A storage that has none is not
    resizable either, and writing to its lazy copy would crash the process.
    """
    if isinstance(tensor, FakeTensor) or tensor.layout != torch.strided:
        return None
    try:
        return torch._lazy_clone(tensor) if tensor.untyped_storage().resizable() else None
    except (NotImplementedError, RuntimeError):
        # Memory that other processes share.
        return None


def expression_of(number: Any) -> Any:
    """Return the expression of a symbol, by which it can be compared and looked up.

    Comparing symbols themselves would add a guard to the program that they come from.

    Args:
        number: A number, or a symbol of an exported program.

    Returns:
        A sympy expression; a number as it is.
    """
    return number.node.expr if isinstance(number, SYMBOLS) else number


def plain_number(number: Any) -> Any:
    """Return the number that a symbol is known to be; a symbol that varies unchanged."""
    if isinstance(number, SYMBOLS):
        node = number.node
        # ``is_number`` is False for sympy's True and False.
        if node.expr.is_number or (node.pytype is bool and not node.expr.free_symbols):
            return node.pytype(node.expr)
    return number


def with_plain_sizes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor of the same storage, with numbers for sizes that are one number."""
    mode = getattr(tensor, "fake_mode", None)
    if mode is None or not any(plain_number(size) is not size for size in tensor.shape):
        return tensor
    sizes, strides = ([*map(plain_number, values)] for values in (tensor.shape, tensor.stride()))
    # The check of bounds would add guards to the program.
    with mode, mode.shape_env.suppress_guards():
        return tensor.as_strided(sizes, strides, plain_number(tensor.storage_offset()))


def varies(number: object) -> bool:
    """Return whether ``number`` is a symbol that is not known to be one number."""
    return isinstance(plain_number(number), SYMBOLS)


def hint_of(number: Any) -> Any:
    """Return the value of a symbol in the example inputs, None if unknown; a number unchanged.

    Args:
        number: A number, or a symbol of an exported program.
    """
    return number.node.hint if isinstance(number, SYMBOLS) else number


def size_range(size: Any, ranges: Mapping[Any, Any] | None = None) -> tuple[int, int | None]:
    """Return the smallest and the largest number that a size can be, without a guard on it.

    Args:
        size: A number, or a symbol of an exported program.
        ranges: The program's ``range_constraints``. Without them the least is too large: torch
            takes each size that varies for 2 or more while it traces.

    Returns:
        Both; the largest is None where there is no bound.
    """
    size = plain_number(size)
    if isinstance(size, int):
        return size, size
    all_ranges = {**size.node.shape_env.var_to_range, **(ranges or {})}
    least, most = expression_range(expression_of(size), all_ranges)
    return max(0, least), most


def expression_range(expression: Any, ranges: Mapping[Any, Any]) -> tuple[int, int | None]:
    """Return the smallest and the largest number that an expression can be.

    Args:
        expression: A sympy expression of integers.
        ranges: The range of each of its symbols.

    Returns:
        Both; the least is 0 and the largest is None where there is no bound.
    """
    # Who made the symbol has loaded this module; importing it would load sympy, which takes 0.3 s.
    shapes: Any = torch.fx.experimental.symbolic_shapes
    bounds = shapes.bound_sympy(expression, ranges)
    if not bounds.upper < _NO_BOUND:
        bounds = bounds & shapes.bound_sympy(*_with_divisors(expression, ranges, shapes))
    least = int(bounds.lower) if bounds.lower > -_NO_BOUND else 0
    # torch writes "no bound" as infinity, or as a number next to the largest 64-bit integer.
    return (least, int(bounds.upper)) if bounds.upper < _NO_BOUND else (least, None)


def _with_divisors(
    expression: Any, ranges: Mapping[Any, Any], shapes: Any
) -> tuple[Any, dict[Any, Any]]:
    """Return an expression with symbols of 1 or more for its divisors, and what they can be.

    A size that is divided by 0 is none: ``n // (n // 4)`` is at most ``n``.
    """
    extended = dict(ranges)
    divisors: dict[Any, Any] = {}
    for quotient in expression.atoms(shapes.FloorDiv):
        divisor = quotient.args[1]
        if not divisor.is_number:
            symbol = divisors.setdefault(divisor, shapes.sympy.Dummy(integer=True, positive=True))
            bounds = shapes.bound_sympy(divisor, ranges)
            extended[symbol] = type(bounds)(max(1, bounds.lower), max(1, bounds.upper))
    return expression.xreplace(divisors), extended


def upper_bound(size: Any, ranges: Mapping[Any, Any] | None = None) -> int:
    """Return an upper bound of a size, or an estimate, without a guard on it.

    Args:
        size: A number, or a symbol of an exported program.

    Returns:
        The number; the top of a symbol's range; the symbol's value in the example inputs, where
        the range has no top; or the least of the range, where the example has none.
    """
    if isinstance(size, int):
        return size
    least, top = size_range(size, ranges)
    if top is not None and top <= _LARGEST:
        return top
    hint = hint_of(size)
    return least if hint is None else int(hint)


class ProgramParts(TypedDict, total=False):
    """Parts of a program, by the names of its properties."""

    graph_module: GraphModule
    graph_signature: ExportGraphSignature
    state_dict: dict[str, Any]
    constants: dict[str, Any]
    module_call_graph: list[ModuleCallEntry]
    verifiers: list[type]
    example_inputs: tuple[tuple[Any, ...], dict[str, Any]] | None
    range_constraints: dict[Any, Any]
    guards_code: list[str]


def set_program_parts(program: ExportedProgram, **parts: Unpack[ProgramParts]) -> None:
    """Replace parts of ``program`` in place.

    Args:
        program: A program that nothing else refers to.
        parts: The new parts, neither copied nor verified.
    """
    for name, value in parts.items():
        setattr(program, f"_{name}", value)


def with_parts(
    program: ExportedProgram,
    cls: type[ExportedProgram] = ExportedProgram,
    **parts: Unpack[ProgramParts],
) -> ExportedProgram:
    """Return a program that shares all parts of ``program`` except those that are given.

    ``ExportedProgram(...)`` generates code, converts guards and verifies each time it is called;
    for a thousand partitions of one program that is work for nothing: the whole is verified once.

    Args:
        program: Any program; not changed.
        cls: The class of the new program.
        parts: The new parts, neither copied nor verified.
    """
    # Not ``copy.copy``, which pickles the subclass that lowered-module has.
    new_program = cls.__new__(cls)
    new_program.__dict__.update(program.__dict__)
    set_program_parts(new_program, **parts)
    return new_program


def add_node(
    graph: Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...],
    name: str,
    kwargs: dict[str, Any] | None = None,
    type_expr: Any = None,
) -> Node:
    """Add a node at the insert point of ``graph``, as ``Graph.create_node`` does but faster.

    ``Graph.create_node`` flattens all arguments to look for raw symbolic numbers; the caller
    passes none.

    Args:
        op: The kind of node.
        target: What it calls or reads.
        name: The name wanted; it gets a number if it is taken.
        type_expr: The type of its value, where that is known.
    """
    if graph._owning_module is not None:
        # The owner may have hooks that run for each new node.
        return graph.create_node(op, target, args, kwargs or {}, name, type_expr)
    free = _free_name(graph, name)
    return _append(graph, Node(graph, free, op, target, args, kwargs or {}, type_expr))


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


def restore_users(graph: Graph) -> None:
    """Add every node to the users of what it reads.

    ``torch.export`` (2.13) leaves some out where a value made under ``no_grad`` is read once more
    after a write. A pass that follows ``users`` would lose those edges.

    Args:
        graph: The graph; nothing changes where it is whole.
    """
    for node in graph.nodes:
        for source in node._input_nodes:
            if node not in source.users:
                source.users[node] = None


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
    new_name = node.name if name is None else name
    copied = add_node(graph, node.op, node.target, args, new_name, kwargs, node.type)
    # Filled, not replaced: setting an attribute of a node looks the node up in its graph.
    copied.meta.update(node.meta if meta is None else meta)
    return copied


def copy_graph(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """Return a copy of ``graph`` without an owner, and the copies of its nodes.

    Nodes keep their names: fx would rename the copy of a node called "input", which signatures
    refer to.
    """
    copied = Graph(tracer_cls=graph._tracer_cls)
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        copies[node] = copy_node(copied, node, copies)
        if copies[node].name != node.name:
            copies[node].name = node.name
    copied.set_codegen(copy.deepcopy(graph._codegen))
    return copied, copies


def erase_nodes_now(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erase ``nodes``, each without users when its turn comes, as ``Graph.erase_node`` does.

    Args:
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


def reads_only_earlier(nodes: Sequence[Node]) -> bool:
    """Return whether each of ``nodes`` reads nothing but nodes before it among ``nodes``.

    By inputs, since torch may have lost users; ``all_input_nodes`` would build a list for each.

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
