"""Uses of private torch APIs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypedDict, TypeVar, Unpack
from weakref import WeakKeyDictionary

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
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = [
    # Re-exported from torch
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "OperatorBase",
    "TorchDispatchMode",
    "detect_fake_mode",
    "enable_python_dispatcher",
    "is_traceable_wrapper_subclass",
    "pytree",
]


_MAX_SIZE = 2**31 - 1  # larger upper bounds count as unbounded
_NO_BOUND = 2**62  # torch represents "unbounded" as infinity or a number near 2**63

_Function = TypeVar("_Function", bound=Callable[..., Any])

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Types of symbolic numbers."""

NormBase: type[torch.nn.Module] = _NormBase
"""Base class of all batch and instance norms."""

LazyGraphModule: type[GraphModule] = _LazyGraphModule
"""Graph module that generates its code at the first call."""

# Explicitly typed for type checkers.
executorch_call_delegate: HigherOrderOperator = _executorch_call_delegate
"""Higher-order operator that calls a lowered module (not in ``torch.ops`` until imported)."""


def assume_constant_result(function: _Function) -> _Function:
    """Mark a function that dynamo calls instead of tracing it.

    ``torch.compiler.assume_constant_result`` sets the same mark, but imports dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@functools.cache
def core_decompositions() -> Mapping[OperatorBase, Callable[..., Any]]:
    """Return torch's decompositions to core ATen, without composite operators."""
    return dict(_core_decompositions())


@functools.cache
def _core_decompositions() -> Mapping[OperatorBase, Callable[..., Any]]:
    return _core_aten_decompositions_post_autograd()


def reserve_name(graph: Graph, name: str) -> None:
    """Reserve a node name in ``graph``, in place."""
    graph._graph_namespace.create_name(name, None)


def schema_of(operator: OpOverload) -> torch.FunctionSchema:
    """Return the schema of an operator overload."""
    return operator._schema


def find_schema(target: object) -> torch.FunctionSchema | None:
    """Return the schema of an operator overload of any dialect, or None for other objects."""
    schema: torch.FunctionSchema | None = getattr(target, "_schema", None)
    return schema


def overload_name(operator: OpOverload) -> str:
    """Return the overload name of an operator, such as ``"Tensor"`` or ``"default"``."""
    name: str = operator._overloadname
    return name


@functools.cache
def composite_parts(operator: OpOverload) -> Callable[..., object] | None:
    """Return the decomposition of a composite operator, or None for others."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    try:
        if not operator.has_kernel_for_dispatch_key(key):
            return None
    except RuntimeError:
        return None  # Some overloads are TorchScript-only.
    # ``OpOverload.decompose`` prefers Python kernels, which the caller may have overridden.
    return functools.partial(operator._op_dk, key)


def is_impure(module: object) -> bool:
    """Return whether dead code elimination keeps calls of ``module``."""
    return bool(getattr(module, "_is_impure", False))


def data_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's first element for reading, or 0 if it has no memory.

    ``Tensor.data_ptr()`` allows writes, so it would materialize a lazy clone.
    """
    try:
        start: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]  # not in its stubs
    except (NotImplementedError, RuntimeError):
        return 0
    return start and start + int(tensor.storage_offset()) * tensor.element_size()


def storage_identity(tensor: torch.Tensor) -> int | None:
    """Return the id of a tensor's storage, valid while it is alive, or None without storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        # Sparse tensors and some subclasses have no storage.
        return None


def shared_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy-on-write clone, or None if unsupported.

    At a write, torch allocates with the storage's allocator. Storages without an allocator are not
    resizable, and writing to a lazy clone of one would crash.
    """
    if isinstance(tensor, FakeTensor) or tensor.layout != torch.strided:
        return None
    try:
        return torch._lazy_clone(tensor) if tensor.untyped_storage().resizable() else None
    except (NotImplementedError, RuntimeError):
        # Memory shared between processes.
        return None


def expression_of(number: Any) -> Any:
    """Return the sympy expression of a symbol, for comparison and lookup.

    Comparing symbols themselves would add guards to their program.

    Args:
        number: A number or a symbol.

    Returns:
        A sympy expression, or ``number`` itself.
    """
    if not isinstance(number, SYMBOLS):
        return number
    # ``SymNode.expr`` walks the expression at each call before it reads these.
    node = number.node
    version = getattr(node.shape_env, "_replacements_version_counter", None)
    if version == 0:
        return node._expr
    return node._expr_cache if version == node._expr_ver else node.expr


def plain_number(number: Any) -> Any:
    """Return the number of a specialized symbol; other values unchanged."""
    if isinstance(number, SYMBOLS):
        expression = expression_of(number)
        if not _symbols_of(expression):
            return number.node.pytype(expression)
    return number


def with_plain_sizes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor on the storage of ``tensor``, with specialized sizes as ints."""
    mode = getattr(tensor, "fake_mode", None)
    if mode is None or not any(plain_number(size) is not size for size in tensor.shape):
        return tensor
    sizes, strides = ([*map(plain_number, values)] for values in (tensor.shape, tensor.stride()))
    # The bounds check would add guards.
    with mode, mode.shape_env.suppress_guards():
        return tensor.as_strided(sizes, strides, plain_number(tensor.storage_offset()))


def new_fake(
    like: torch.Tensor, size: Sequence[Any], stride: Sequence[Any] | None = None
) -> FakeTensor:
    """Return a fake tensor with other sizes, without guards.

    Args:
        like: Fake tensor with the mode, dtype and device of the result.
        size: Numbers or symbols.
        stride: In elements; None for a contiguous tensor.
    """
    mode: Any = like.fake_mode  # type: ignore[attr-defined]
    return empty_fake(mode, size, stride, like.dtype, like.device)


_PROTOTYPES: WeakKeyDictionary[FakeTensorMode, dict[Any, torch.Tensor]] = WeakKeyDictionary()


def empty_fake(
    mode: FakeTensorMode,
    size: Sequence[Any],
    stride: Sequence[Any] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> FakeTensor:
    """Return a fake tensor with a new storage, without guards.

    For symbolic sizes torch computes the layout of each new tensor. A copy of an earlier tensor
    with the same sizes and mode reuses the layout.
    """
    layout = [tuple(map(plain_number, part)) for part in (size, stride) if part is not None]
    create = torch.empty if stride is None else torch.empty_strided
    inner: Any = functools.partial(create, *layout, dtype=dtype, device="meta")
    if {int}.issuperset(map(type, chain(*layout))):
        return FakeTensor(mode, inner(), device)
    prototypes = _PROTOTYPES.setdefault(mode, {})
    key = (dtype, *(tuple(map(expression_of, part)) for part in layout))
    if key not in prototypes:
        # torch 2.15 compares sizes with 0 here, which would add guards.
        environment: Any = mode.shape_env
        with environment.suppress_guards():
            prototypes[key] = inner()
    return FakeTensor(mode, torch._lazy_clone(prototypes[key]), device)


def varies(number: object) -> bool:
    """Return whether ``number`` is a symbol that is not specialized."""
    return isinstance(plain_number(number), SYMBOLS)


def hint_of(number: Any) -> Any:
    """Return the hint of a symbol (its example value), or None; numbers unchanged.

    Args:
        number: A number or a symbol.
    """
    return number.node.hint if isinstance(number, SYMBOLS) else number


def size_range(size: Any, ranges: Mapping[Any, Any] | None = None) -> tuple[int, int | None]:
    """Return the lower and upper bound of a size, without adding guards.

    Args:
        size: A number or a symbol.
        ranges: The program's ``range_constraints``. Without them the lower bound may be too large:
            tracing assumes dynamic sizes of at least 2.

    Returns:
        Lower and upper bound; None if unbounded above.
    """
    size = plain_number(size)
    if isinstance(size, int):
        return size, size
    all_ranges = {**size.node.shape_env.var_to_range, **(ranges or {})}
    least, most = expression_range(expression_of(size), all_ranges)
    return max(0, least), most


def expression_range(expression: Any, ranges: Mapping[Any, Any]) -> tuple[int, int | None]:
    """Return the lower and upper bound of an expression.

    Args:
        expression: A sympy expression of integers.
        ranges: Range of each symbol.

    Returns:
        Lower and upper bound; 0 and None if unbounded.
    """
    symbols = _symbols_of(expression)
    return _bounds_of(expression, tuple((s, ranges[s]) for s in symbols if s in ranges))


@functools.lru_cache(2**14)
def _symbols_of(expression: Any) -> tuple[Any, ...]:
    return tuple(expression.free_symbols)


@functools.lru_cache(2**14)
def _bounds_of(expression: Any, known: tuple[tuple[Any, Any], ...]) -> tuple[int, int | None]:
    ranges = dict(known)
    # Loaded already if symbols exist; an import would load sympy (0.3 s).
    shapes: Any = torch.fx.experimental.symbolic_shapes
    bounds = shapes.bound_sympy(expression, ranges)
    if not bounds.upper < _NO_BOUND:
        bounds = bounds & shapes.bound_sympy(*_with_divisors(expression, ranges, shapes))
    least = int(bounds.lower) if bounds.lower > -_NO_BOUND else 0
    return (least, int(bounds.upper)) if bounds.upper < _NO_BOUND else (least, None)


def _with_divisors(
    expression: Any, ranges: Mapping[Any, Any], shapes: Any
) -> tuple[Any, dict[Any, Any]]:
    """Return an expression with positive symbols for its divisors, and the ranges of all symbols.

    Divisors of sizes are not 0: ``n // (n // 4)`` is at most ``n``.
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
    """Return an upper bound of a size, or an estimate, without adding guards.

    Args:
        size: A number or a symbol.

    Returns:
        The number; for a symbol its upper bound if that is below 2**31, else its hint if any, else
        its lower bound.
    """
    if isinstance(size, int):
        return size
    least, top = size_range(size, ranges)
    if top is not None and top <= _MAX_SIZE:
        return top
    hint = hint_of(size)
    return least if hint is None else int(hint)


class ProgramParts(TypedDict, total=False):
    """Parts of a program, by property name."""

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
        program: A program without other references.
        parts: New parts, neither copied nor verified.
    """
    for name, value in parts.items():
        setattr(program, f"_{name}", value)


def with_parts(
    program: ExportedProgram,
    cls: type[ExportedProgram] = ExportedProgram,
    **parts: Unpack[ProgramParts],
) -> ExportedProgram:
    """Return a program that shares all other parts with ``program``.

    Unlike ``ExportedProgram(...)``, it does not generate code, convert guards or verify.

    Args:
        program: Any program; not changed.
        cls: Class of the new program.
        parts: New parts, neither copied nor verified.
    """
    # Not ``copy.copy``, which pickles lowered-module's subclass.
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
    """Add a node at the insert point, faster than ``Graph.create_node``.

    The arguments must not contain raw symbolic numbers, which ``Graph.create_node`` checks for.

    Args:
        name: Preferred name; made unique.
        type_expr: Type of the value, if known.
    """
    if graph._owning_module is not None:
        # The owner may have node creation hooks.
        return graph.create_node(op, target, args, kwargs or {}, name, type_expr)
    free = _free_name(graph, name)
    return _append(graph, Node(graph, free, op, target, args, kwargs or {}, type_expr))


def _free_name(graph: Graph, name: str) -> str:
    """Return a legal, unique name, as torch does but faster."""
    namespace = graph._graph_namespace
    is_legal = name.isidentifier() and name.isascii() and name not in _illegal_names
    if not is_legal or name in namespace._used_names:
        return namespace.create_name(name, None)
    namespace._used_names.add(name)
    return name


def _append(graph: Graph, node: Node) -> Node:
    graph._graph_namespace._obj_to_name[node] = node.name
    graph._insert(node)
    # Graph.find_nodes looks functions up by target, other nodes only by op.
    op = node.op
    key = (op, node.target if op == "call_function" else None)
    graph._find_nodes_lookup_table.table[key][node] = None
    graph._len += 1
    return node


def restore_users(graph: Graph) -> None:
    """Restore missing ``Node.users`` in place.

    ``torch.export`` (2.13) omits users if a value from ``no_grad`` is read again after a write.
    Passes that follow ``users`` would lose these edges.
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
    """Append a copy of ``node`` to ``graph``, faster than ``Graph.node_copy``.

    Args:
        graph: Target graph, without an owner.
        node: A node of another graph.
        env: Copies of the inputs of ``node``.
        name: Preferred name; that of ``node`` by default.
        meta: Meta of the copy; that of ``node`` by default.
    """
    lookup = env.__getitem__
    args: Any = map_arg(node._args, lookup) if node._args else ()
    kwargs: Any = map_arg(node._kwargs, lookup) if node._kwargs else {}
    new_name = node.name if name is None else name
    copied = add_node(graph, node.op, node.target, args, new_name, kwargs, node.type)
    # Update in place: setting a node attribute is slow.
    copied.meta.update(node.meta if meta is None else meta)
    return copied


def copy_graph(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """Return a copy of ``graph`` without an owner, and the copy of each node.

    Node names are kept: fx would rename a node called "input", which signatures refer to.
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
    """Erase ``nodes`` in order, faster than ``Graph.erase_node``.

    Args:
        nodes: Users before their inputs.
    """
    owner = graph.owning_module
    if owner is not None and getattr(owner, "_erase_node_hooks", None):
        for node in nodes:
            graph.erase_node(node)
        return
    remove_from_table = graph._find_nodes_lookup_table.remove
    count = 0
    for node in nodes:
        remove_from_table(node)
        node._remove_from_list()
        # Bypass the slow Node.__setattr__.
        object.__setattr__(node, "_erased", True)
        node._update_args_kwargs((), {})
        count += 1
    graph._len -= count


def mark_impure(module: GraphModule) -> None:
    """Protect calls of ``module`` and its copies from dead code elimination."""
    attributes = module.meta.setdefault(_USER_PRESERVED_ATTRIBUTES_KEY, {})
    attributes["_is_impure"] = True
    module._is_impure = True  # type: ignore[assignment]


def reads_only_earlier(nodes: Sequence[Node]) -> bool:
    """Return whether ``nodes`` is in topological order and reads no other nodes.

    Only inputs are checked, because torch may lose users.

    Args:
        nodes: Distinct nodes of one graph.
    """
    seen: dict[Node, None] = {}
    earlier = seen.keys()
    for node in nodes:
        if not node._input_nodes.keys() <= earlier:
            return False
        seen[node] = None
    return True
