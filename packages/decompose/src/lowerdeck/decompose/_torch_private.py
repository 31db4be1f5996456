"""Uses of private torch APIs; see ``tests/test_torch_private.py``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from threading import RLock
from typing import Any

import torch
from torch._export.utils import _is_preservable_cia_op
from torch._export.verifier import Verifier
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.export import ExportedProgram, ModuleCallEntry
from torch.export.decomp_utils import PRESERVED_ATEN_CIA_OPS
from torch.export.exported_program import (
    _common_getitem_elimination_pass,
    _override_composite_implicit_decomp,
)
from torch.fx import Graph, GraphModule, Node
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.fx.node import map_arg
from torch.fx.passes.runtime_assert import insert_deferred_runtime_asserts
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.fx.proxy import _COPY_META_FIELDS

from lowerdeck.decompose.recording import Recording
from lowerdeck.decompose.results import CachedSignature, Parts
from lowerdeck.torch_base import (
    SYMBOLS,
    FakeTensorMode,
    HigherOrderOperator,
    OperatorBase,
    OpOverload,
    TorchDispatchMode,
    composite_parts,
    detect_fake_mode,
    enable_python_dispatcher,
    plain_number,
    pytree,
    set_program_parts,
    storage_identity,
    varies,
    with_parts,
)

COPIED_META: Sequence[str] = tuple(
    field for field in _COPY_META_FIELDS if field not in {"original_aten", "from_node"}
)
"""Metadata fields that derived nodes inherit."""

KEPT_COMPOSITES: frozenset[OperatorBase] = frozenset(PRESERVED_ATEN_CIA_OPS)
"""Composite operators that torch keeps by default."""

tensor_meta: Callable[..., Any] = _extract_tensor_metadata
"""Returns the ``tensor_meta`` of a tensor; with a true second argument, with memory format."""

WRITING_CUSTOM: HigherOrderOperator = auto_functionalized_v2
"""Functional form of custom operators that mutate arguments."""

overriding: Callable[..., AbstractContextManager[None]] = _override_composite_implicit_decomp
"""Context in which a mapping's functions decompose composite operators.

A function may return ``NotImplemented`` to keep the call.
"""

REPLAYS_PARTS_ALONE = torch.__version__ >= "2.15"
"""Whether functionalization regenerates a single result of ``split`` or ``unbind``."""

DROPOUT_COPIES = torch.__version__ < "2.14"
"""Whether torch's decomposition of dropout in evaluation mode copies its input."""

# torch's tracing patches operators process-wide, so concurrent traces fail.
tracing_lock = RLock()
"""Held during traces."""


def has_composite_kernel(operator: OpOverload) -> bool:
    """Return whether ``operator`` has a CompositeImplicitAutograd kernel, in C++ or Python."""
    return composite_parts(operator) is not None


def is_preservable(operator: OperatorBase) -> bool:
    """Return whether torch can keep a composite operator: it neither mutates nor aliases."""
    return bool(_is_preservable_cia_op(operator))


def _import_lazily(name: str) -> Any:
    """Import a torch module lazily, because it loads sympy."""
    return import_module(name)


@cache
def base_name(target: Any) -> str:
    """Return the node name of a call of ``target``, before it is made unique."""
    name = (target.overloadpacket if isinstance(target, OpOverload) else target).__name__
    # CamelCase to snake_case, as torch.fx does.
    return re.sub(r"(?<=[a-z])([A-Z])", r"_\1", name).lower()


def fake_mode_of(graph_module: GraphModule) -> FakeTensorMode:
    """Return the fake mode of a graph, or a new one."""
    for node in graph_module.graph.nodes:
        # Stop at the first fake tensor: ``detect_fake_mode`` compares all.
        value = node.meta.get("val")
        mode = None if value is None else detect_fake_mode([value])
        if mode is not None:
            return mode
    environment = _import_lazily("torch.fx.experimental.symbolic_shapes").ShapeEnv()
    return FakeTensorMode(shape_env=environment, export=True)


def has_unbacked_sizes(value: Any) -> bool:
    """Return whether tensors in ``value`` have unbacked sizes."""
    return bool(
        _import_lazily("torch.fx.experimental.symbolic_shapes").free_unbacked_symbols(value)
    )


def node_source(node: Node) -> fx_traceback.NodeSource:
    """Return the ``from_node`` entry for nodes derived from ``node``."""
    return fx_traceback.NodeSource(
        node, "lowerdeck.decompose", fx_traceback.NodeSourceAction.CREATE
    )


def as_current_node(node: Node) -> AbstractContextManager[Any]:
    """Return a context in which rules can read the metadata of ``node``."""
    context: AbstractContextManager[Any] = fx_traceback.set_current_meta(node)
    return context


def own_rule(operator: Any) -> Mapping[OperatorBase, Callable[..., Any]]:
    """Return torch's decomposition of a composite operator, for ``overriding``.

    torch's retrace overrides all composites like this. They are then decomposed below autograd,
    where views of parameters require no gradients, and in C++, where conversions check no
    metadata. Here only the traced operator is overridden.

    Args:
        operator: The target of a call; the result is empty unless it is a preservable composite.
    """
    if not isinstance(operator, OpOverload) or not _is_preservable_cia_op(operator):
        return {}
    kernel = operator.py_kernels.get(torch._C.DispatchKey.CompositeImplicitAutograd)
    parts: Any = kernel if callable(kernel) else composite_parts(operator)
    return {operator: parts}


@contextmanager
def tracing_settings() -> Iterator[None]:
    """Disable oneDNN, NNPACK and cuDNN process-wide, as torch's tracing does."""
    trace = _import_lazily("torch.export._trace")
    with trace._ignore_backend_decomps(), trace._compiling_state_context():
        yield


def record(
    function: Callable[..., Any],
    leaves: Sequence[Any],
    mode: FakeTensorMode,
    rules: Mapping[OperatorBase, Callable[..., Any]],
    differentiable: Container[int] = (),
    contexts: Sequence[Callable[[], AbstractContextManager[Any]]] = (),
) -> Recording:
    """Return the operators that ``function`` calls on fake tensors, as in torch's retrace.

    Args:
        function: Function to call with ``leaves``, whose tensors are wrapped as functional
            tensors.
        leaves: Fake tensors and symbols.
        rules: Decompositions of non-composite operators.
        differentiable: Positions of views of tensors that require gradients.
        contexts: Factories of additional contexts, outermost first.
    """
    tracer: Any = PythonKeyTracer()
    tracer.root = torch.nn.Module()
    tracer.graph = Graph(tracer_cls=PythonKeyTracer)
    tracer.tensor_attrs = {}
    tracer.record_stack_traces = False
    tracer.proxy_module_inputs = False
    inputs = _track_inputs(tracer, leaves)
    table: Any = rules
    functional = FunctionalTensorMode(_allow_token_discovery=True)
    entered: Sequence[Callable[[], AbstractContextManager[Any]]] = (
        unset_fake_temporarily,
        lambda: mode,
        torch.no_grad,
        enable_python_dispatcher,
        lambda: functional,
        lambda: ProxyTorchDispatchMode(tracer, "real", decomposition_table=table),
        fx_traceback.preserve_node_meta,
        *contexts,
    )
    with ExitStack() as stack:
        stack.callback(setattr, mode, "cache_enabled", mode.cache_enabled)
        # Tensors of symbolic sizes take longer to cache than to compute.
        mode.cache_enabled &= not any(map(_has_symbols, leaves))
        for enter in entered:
            stack.enter_context(enter())
        wrapped = [_functional(leaf) for leaf in leaves]
        for index, leaf in enumerate(wrapped):
            if index in differentiable:
                leaf.requires_grad_()
        result = function(*wrapped)
        outcome = _outcome(tracer, wrapped, result)
    return Recording(
        tracer.graph,
        inputs,
        *outcome,
        _creates_sizes(mode, tracer.graph),
        bool(functional._tokens),
    )


def _creates_sizes(mode: FakeTensorMode, graph: Graph) -> bool:
    """Return whether unbacked symbols were created, and discard pending ones."""
    pending = [] if mode.shape_env is None else mode.shape_env.pending_fresh_unbacked_symbols
    creates = bool(pending) or any(node.meta.get("unbacked_bindings") for node in graph.nodes)
    pending.clear()
    return creates


def run_fake(operator: Any, args: Any, kwargs: Any, mode: FakeTensorMode) -> Any:
    """Return the result of ``operator`` on fake tensors, as in a trace."""
    with unset_fake_temporarily(), mode, torch.no_grad(), enable_python_dispatcher():
        return operator(*args, **kwargs)


class _FirstCall(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that raises an error at the first call of an operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Reading the device of a fake tensor calls an operator of ``prim``.
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        raise NotImplementedError(func)


def declines(rule: Callable[..., Any], call: Node) -> bool:
    """Return whether a rule returns ``NotImplemented`` before it calls any operator.

    Args:
        rule: A decomposition, which returns ``NotImplemented`` to keep a call.
        call: The call; the rule gets the recorded values of its arguments.
    """
    args, kwargs = map_arg((call.args, dict(call.kwargs)), lambda node: node.meta.get("val"))
    mode: Any = detect_fake_mode(args)
    environment = None if mode is None else mode.shape_env
    guards = nullcontext() if environment is None else environment.suppress_guards()
    try:
        first_call: Any = _FirstCall
        settings = fx_traceback.preserve_node_meta(), as_current_node(call)
        with settings[0], settings[1], enable_python_dispatcher(), guards, first_call():
            return rule(*args, **kwargs) is NotImplemented
    except Exception:
        # A rule that fails here may succeed while tracing; otherwise torch reports the error.
        return False


def replace_view(view: Any, new: Any) -> None:
    """Replace the elements of a view in place."""
    torch._sync(new)  # type: ignore[attr-defined, no-untyped-call]
    view.replace_(torch._from_functional_tensor(new.elem))
    view.commit_update()


def _has_symbols(leaf: Any) -> bool:
    sizes = leaf.shape if isinstance(leaf, torch.Tensor) else [leaf]
    return any(isinstance(size, SYMBOLS) for size in sizes)


def _track_inputs(tracer: Any, leaves: Sequence[Any]) -> list[Node]:
    inputs: list[tuple[int, Node]] = []
    # Symbols first, so that tensor sizes refer to them.
    for kinds in (SYMBOLS, torch.Tensor):
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, kinds):
                proxy = tracer.create_proxy("placeholder", f"given_{index}", (), {})
                inputs.append((index, proxy.node))
                track_tensor_tree(leaf, proxy, constant=None, tracer=tracer)
    return [node for _, node in sorted(inputs, key=lambda pair: pair[0])]


def _functional(leaf: Any) -> Any:
    return FunctionalTensor.to_functional(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _outcome(tracer: Any, wrapped: list[Any], result: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Return the fields of a ``Recording`` from ``result`` on, which describe the result."""
    leaves = pytree.tree_leaves(result)
    returned: dict[int, int] = {}
    shared: dict[int, list[int]] = {}
    by_storage: dict[Any, list[int]] = {}
    for index, tensor in enumerate(wrapped):
        if isinstance(tensor, FunctionalTensor):
            by_storage.setdefault(storage_identity(tensor), []).append(index)
    storages: list[Any] = [None] * len(leaves)
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, FunctionalTensor):
            continue
        storages[position] = storage_identity(leaf)
        for index in by_storage.get(storages[position], ()):
            if leaf is wrapped[index]:
                returned[position] = index
            else:
                shared.setdefault(position, []).append(index)
    # Results with the same storage alias each other.
    counts = Counter(storages)
    unaliased = {
        position
        for position, storage in enumerate(storages)
        if storage is not None and storage not in by_storage and counts[storage] == 1
    }
    nodes = pytree.tree_map(lambda leaf: _node_of(tracer, leaf), result)
    written = {
        index: _node_of(tracer, tensor)
        for index, tensor in enumerate(wrapped)
        if isinstance(tensor, FunctionalTensor)
        and torch._functionalize_has_data_mutation(tensor.elem)  # type: ignore[attr-defined]
    }
    differentiable = {
        position
        for position, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    }
    return nodes, written, returned, shared, unaliased, differentiable


_TRACKED = (torch.Tensor, *SYMBOLS)


def _node_of(tracer: Any, leaf: Any) -> Any:
    """Return the node of a tensor or symbol, or other values unchanged."""
    if isinstance(leaf, torch.Tensor):
        if isinstance(leaf, FunctionalTensor):
            torch._sync(leaf)  # type: ignore[attr-defined, no-untyped-call]
            leaf = torch._from_functional_tensor(leaf.elem)
        proxy: Any = get_proxy_slot(leaf, tracer, None, lambda slot: slot.proxy)
        if proxy is None:
            # A rule may return a tensor that it did not compute, such as a global.
            raise LookupError("a rule returned a tensor that was not traced")
        return proxy.node
    if isinstance(leaf, _TRACKED):
        if not varies(leaf):
            return plain_number(leaf)
        slot: Any = get_proxy_slot(leaf, tracer)
        return slot.force().node
    return leaf


def insert_assertions(
    graph_module: GraphModule, fixed: Iterable[Node] = (), *, export: bool = True
) -> None:
    """Insert runtime assertions on sizes in place, as at the end of torch's retrace.

    Args:
        fixed: Numbers read from tensors, which stay although an assertion makes them equal to
            sizes.
        graph_module: A decomposed graph in which equal sizes are computed once.
        export: Whether it is the program's root graph.
    """
    environment: Any = fake_mode_of(graph_module).shape_env
    trace = 'File "torch/fx/passes/runtime_assert.py", line 24, in insert_deferred_runtime_asserts'

    # The hook sets the ``val`` of new nodes.
    hooks = _import_lazily("torch._export.passes._node_metadata_hook")

    def hook(node: Node) -> None:
        hooks._node_metadata_hook(node, metadata={"stack_trace": trace})

    # torch replaces values of equal expressions.
    values = {node: node.meta.pop("val") for node in fixed}
    with hooks._set_node_metadata_hook(graph_module, hook) if export else nullcontext():
        insert_deferred_runtime_asserts(
            graph_module, environment, "exported program", export=export
        )
    for node, value in values.items():
        node.meta["val"] = value
    # The search reads all sizes of all values.
    if export and has_unbacked_sizes([*environment.var_to_range]):
        _import_lazily("torch.export._trace")._replace_unbacked_bindings(graph_module)


def assemble(
    program: ExportedProgram, parts: Parts, calls: list[ModuleCallEntry]
) -> ExportedProgram:
    """Return a verified program with the decomposed parts.

    Unlike ``ExportedProgram(...)``, code is generated lazily at the first call.

    Args:
        program: The program before decomposition, whose state is shared.
        calls: Preserved module calls.
    """
    graph_module, signature = parts.graph_module, parts.graph_signature
    # Assertions on unbacked symbols may duplicate getitem nodes.
    _common_getitem_elimination_pass(graph_module, signature, calls)
    environment: Any = fake_mode_of(graph_module).shape_env
    ranges = {} if environment is None else dict(program.range_constraints)
    for symbol, bounds in () if environment is None else environment.var_to_range.items():
        ranges.setdefault(symbol, bounds)
    new_program = with_parts(
        program,
        graph_module=graph_module,
        # Only for the verifier, which reads the properties for each output.
        graph_signature=CachedSignature(signature.input_specs, signature.output_specs),
        constants=dict(parts.constants),
        module_call_graph=calls,
        verifiers=[Verifier],
        range_constraints={
            symbol: bounds
            for symbol, bounds in ranges.items()
            if symbol not in environment.replacements
        },
    )
    new_program.validate()  # type: ignore[no-untyped-call]
    set_program_parts(new_program, graph_signature=signature)
    return new_program
