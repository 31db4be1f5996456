"""Map recorded call signatures to leaves of the working graph.

A call with a signature has eager's arguments and results, so an eager module can replace its
module. A leaf is an element of the flattened arguments or result: a node, a constant, or
``Absent`` if the program dropped it. Export moves calls under ``no_grad`` or autocast to
subgraphs (mode regions) and records no leaves there; ``export_preserving`` stores them in
``trace.notes[LEAVES]``.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument
from torch.fx import Node

from lowerdeck.torch_base import (
    HigherOrderOperator,
    OpOverload,
    is_getitem,
    returns_written,
    schema_of,
)
from lowerdeck.unflatten._torch_private import is_decomposed
from lowerdeck.unflatten.call_signature import CallSignature, argument_variables, flat_signature
from lowerdeck.unflatten.cut.working_graph import (
    Absent,
    Leaf,
    PreservedCall,
    ProgramCopier,
    WorkingGraph,
)
from lowerdeck.unflatten.metadata import INNER, LEAVES, NOT_RECORDED
from lowerdeck.unflatten.trace import Trace
from lowerdeck.unflatten.trace.calls import Frame

NO_SIGNATURE = (
    "has no recorded signature (only flat values). Export the model with export_preserving"
)
DECOMPOSED = (
    "has no signature (only flat values) in a decomposed program. Unflatten the "
    "program before run_decompositions()"
)
NO_CALL = "has no recorded call: it computes nothing, or is called in a branch"
SOME_CALLS = "has unrecorded calls, which return an argument unchanged"
RETURNS_OTHERS = "returns a value of another module that is not an argument"


def find_preserved_calls(trace: Trace, copier: ProgramCopier) -> None:
    """Add calls with a signature to the working graph, and refusal reasons for the others.

    Args:
        copier: The copier, which has copied all nodes except the output.
    """
    working = copier.working
    recorded = {
        entry.fqn: entry.signature
        for entry in trace.program.module_call_graph
        if entry.fqn and entry.signature is not None
    }
    if recorded and is_decomposed(trace.program):
        warnings.warn(
            "This program was decomposed, which loses recorded call signatures: its modules "
            "cannot be replaced or hooked. Unflatten the program before run_decompositions().",
            UserWarning,
            stacklevel=5,
        )
        recorded = {}
    for path, reason in trace.notes[NOT_RECORDED].items():
        working.refusals.setdefault(path, reason)
    if recorded:
        _find_recorded(trace, copier, recorded)
        _refuse_missing_calls(trace, working, recorded)
        _refuse_branches(trace, working)


def _find_recorded(trace: Trace, copier: ProgramCopier, recorded: Mapping[str, Any]) -> None:
    # A region may reuse a name of the root graph; in a signature the name means the root's node.
    nodes = [node for node in trace.program.graph.nodes if node in copier.values]
    by_name = {node.name: copier.values[node] for node in nodes}
    for node, value in copier.values.items():
        by_name.setdefault((node.meta.get("custom") or {}).get(INNER, node.name), value)
    working = copier.working
    frame_of = working.tree.node_frames()

    def is_inside(leaf: Leaf, frame: Frame) -> bool:
        inner = frame_of.get(leaf) if isinstance(leaf, Node) else None
        while inner is not None and inner.depth > frame.depth:
            inner = inner.parent
        return inner is frame

    def leaf_of(value: Any, reader: Frame) -> Leaf:
        if not isinstance(value, list):
            constant: Leaf = value
            return constant
        leaf: Leaf = copier.resolve(by_name.get(value[0], Absent()), reader, early=True)
        if isinstance(leaf, Node) and leaf not in frame_of and leaf.op == "get_attr":
            frame_of[leaf] = reader
        return leaf

    inner = trace.notes[LEAVES]
    for frame in working.tree.frames()[1:]:
        name = frame.recorded if frame.recorded in recorded else frame.path
        if frame.parent is None or name not in recorded:
            continue
        own = recorded.get(frame.call_name)
        signature = own or recorded[name]
        counts = (signature.in_spec.num_leaves, signature.out_spec.num_leaves)
        leaves = inner.get(frame.call_name, [(), ()])
        if own is not None and (len(own.inputs), len(own.outputs)) == counts:
            leaves = [_values(own.inputs), _values(own.outputs)]
        if tuple(map(len, leaves)) != counts:
            # torch's own option records no leaves of a call inside a mode region.
            reason = NO_CALL if own is None else NO_SIGNATURE
            working.refusals.setdefault(frame.path, reason)
            continue
        inputs = tuple([leaf_of(value, frame.parent) for value in leaves[0]])
        outputs = tuple([leaf_of(value, frame) for value in leaves[1]])
        if any(
            isinstance(leaf, Node) and leaf not in inputs and not is_inside(leaf, frame)
            for leaf in outputs
        ):
            working.refusals.setdefault(frame.path, RETURNS_OTHERS)
            continue
        # The caller cannot pass a value that the call itself computes.
        inputs = tuple([Absent() if is_inside(leaf, frame) else leaf for leaf in inputs])
        working.preserved[frame] = PreservedCall(_structure(frame, signature), inputs, outputs)


def _values(leaves: Iterable[Any]) -> list[Any]:
    """Return constants unchanged, and node names in one-element lists."""
    return [leaf.value if isinstance(leaf, ConstantArgument) else [leaf.name] for leaf in leaves]


def _structure(frame: Frame, signature: Any) -> CallSignature:
    """Return the call signature, with eager's parameter names if its class is loaded."""
    count = signature.in_spec.child(0).num_children
    known = getattr(signature, "forward_arg_names", None) or _eager_names(frame.type_name, count)
    names, is_valid = argument_variables(signature.in_spec, known)
    return CallSignature(signature.in_spec, signature.out_spec, names, is_variadic=not is_valid)


def _eager_names(type_name: str | None, count: int) -> list[str]:
    cls = loaded_class(type_name)
    return list(_positional(cls.forward)[:count]) if cls is not None else []


def loaded_class(type_name: str | None) -> type[torch.nn.Module] | None:
    """Return the class of this qualified name if its Python module is loaded."""
    outer, _, name = (type_name or "").rpartition(".")
    # Not by getattr: a module's ``__getattr__`` may import.
    cls: Any = vars(sys.modules[outer]).get(name) if outer in sys.modules else None
    return cls if isinstance(cls, type) and issubclass(cls, torch.nn.Module) else None


@lru_cache(1024)
def _positional(forward: Any) -> Sequence[str]:
    """Return the names of a function's positional parameters after the first."""
    try:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return ()
    kinds = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _refuse_missing_calls(
    trace: Trace, working: WorkingGraph, recorded: Mapping[str, Any]
) -> None:
    """Refuse modules with recorded calls that have no node in the program."""
    canonical = trace.paths.canonical
    frames = working.tree.frames()
    called = {canonical(frame.path) for frame in frames}
    calls = {(canonical(frame.path), frame.index) for frame in frames}
    for name in recorded:
        path, _, number = (name, "", "0") if name in trace.paths else name.rpartition("@")
        if (canonical(path), int(number)) not in calls:
            reason = SOME_CALLS if canonical(path) in called else NO_CALL
            working.refusals.setdefault(path, reason)


def _refuse_branches(trace: Trace, working: WorkingGraph) -> None:
    """Refuse modules whose state a branch or loop reads: these graphs have no module calls."""
    for read, placeholder in working.reads.items():
        if any(isinstance(user.target, HigherOrderOperator) for user in read.users):
            for name in trace.state.names_of(placeholder):
                working.refusals.setdefault(name.rpartition(".")[0], NO_CALL)


def preserve_flat_calls(working: WorkingGraph) -> None:
    """Add flat signatures to calls without a recorded signature."""
    for frame in working.tree.frames()[1:]:
        if frame not in working.preserved and frame.all_nodes():
            working.preserved[frame] = flat_call(frame)


def flat_call(frame: Frame) -> PreservedCall:
    """Return ``frame`` as a call with flat inputs; its outputs are the values used outside.

    Inputs are in order of first use, outputs in order of computation.
    """
    nodes = sorted(frame.all_nodes())
    inside = set(nodes)
    # Reading a size is not a use of the tensor.
    order = sorted(nodes, key=lambda node: node.target is _SIZE)
    inputs = tuple(
        dict.fromkeys(
            source for node in order for source in node.all_input_nodes if source not in inside
        )
    )
    outputs = tuple(node for node in nodes if any(user not in inside for user in node.users))
    return PreservedCall(flat_signature(len(inputs), len(outputs)), inputs, outputs)


_SIZE = torch.ops.aten.sym_size.int


# Operators that may return their argument.


def read_arguments_directly(working: WorkingGraph) -> None:
    """Let nodes outside a call read its argument, not an alias that the call makes of it.

    ``x.to(x.dtype)`` and ``x.add_(1)`` return ``x``. Export then uses the operator's node for the
    tensor, so that later uses of ``x``, such as a residual connection, seem to read a value inside
    the module. Values that the call returns are not replaced.

    Args:
        working: The working graph with its output; changed.
    """
    targets = {node.target for node in working.graph.nodes if node.op == "call_function"}
    if not working.preserved or not any(map(_may_return_argument, targets)):
        return
    frame_of = working.tree.node_frames()
    named_by: dict[Node, list[Frame]] = {}
    for frame, call in working.preserved.items():
        for leaf in call.nodes((*call.inputs, *call.outputs)):
            named_by.setdefault(leaf, []).append(frame)
    for node, inner in frame_of.items():
        source = _argument_outside(node, inner, frame_of)
        if source is None:
            continue
        # Leaves first: an enclosing call may return the node as its own result.
        for frame in sorted(named_by.get(node, ()), key=lambda frame: -frame.depth):
            call = working.preserved[frame]
            caller = frame.parent or frame
            inputs, outputs = call.inputs, call.outputs
            if _is_only_argument(working, node, inner, caller):
                inputs = tuple([source if leaf is node else leaf for leaf in inputs])
            if _is_only_argument(working, node, inner, frame):
                outputs = tuple([source if leaf is node else leaf for leaf in outputs])
            working.preserved[frame] = replace(call, inputs=inputs, outputs=outputs)
            named_by.setdefault(source, []).append(frame)
        for user in list(node.users):
            reader = frame_of.get(user, working.tree.root)
            if _is_only_argument(working, node, inner, reader):
                user.replace_input_with(node, source)


def _is_only_argument(working: WorkingGraph, node: Node, inner: Frame, reader: Frame) -> bool:
    """Return whether ``reader`` is outside calls around ``node``, none of which returns it.

    Only calls with a signature count.
    """
    calls = [
        working.preserved[frame]
        for frame in inner.around(inner.common(reader))
        if frame in working.preserved
    ]
    return bool(calls) and not any(node in call.outputs for call in calls)


def _argument_outside(node: Node, inner: Frame, frame_of: Mapping[Node, Frame]) -> Node | None:
    """Return the value outside ``inner`` that ``node`` aliases, or None."""
    source = node
    while (argument := argument_of(source)) is not None:
        source = argument
        if source.op == "get_attr":
            # State, which each module reads by its own attribute.
            return None
        if frame_of.get(source) is not inner:
            return source
    return None


_RETURN_ARGUMENT = frozenset(
    f"aten::{name}"
    for name in (
        *("to", "type_as", "to_dense", "contiguous", "sum_to_size", "flatten"),
        *("_autocast_to_full_precision", "_autocast_to_reduced_precision"),
        *("_cast_Byte", "_cast_Char", "_cast_Double", "_cast_Float"),
        *("_cast_Half", "_cast_Int", "_cast_Long", "_cast_Short"),
        *("alpha_dropout", "feature_alpha_dropout", "feature_dropout", "native_dropout"),
        *("atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors"),
        *("positive", "real", "conj_physical", "resolve_conj", "resolve_neg"),
    )
)
"""Operators that return their argument if they are a no-op."""


@lru_cache(4096)
def _may_return_argument(target: Any) -> bool:
    return isinstance(target, OpOverload) and (
        returns_written(target) or schema_of(target).name in _RETURN_ARGUMENT
    )


def argument_of(node: Node) -> Node | None:
    """Return the argument that ``node`` returns as is, or None if it computes a value."""
    call, number = node, None
    if is_getitem(node) and isinstance(node.args[0], Node):
        call, number = node.args[0], node.args[1]
    if call.op != "call_function" or not call.args or not _may_return_argument(call.target):
        return None
    source: Any = call.args[0]
    if number is None and returns_written(call.target):
        return source if isinstance(source, Node) else None
    if isinstance(source, (tuple, list)) and isinstance(number, int):
        source = source[number] if number < len(source) else None
    elif number:
        return None  # a mask
    target: Any = call.target
    schema = schema_of(target)
    if schema.name not in _RETURN_ARGUMENT:
        return None
    names = [argument.name for argument in schema.arguments]
    options = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    is_new = options.get("copy") is True or (
        options.get("train") is True and options.get("p") != 0
    )
    is_same = isinstance(source, Node) and not is_new and _layout(node) == _layout(source)
    return source if is_same and _layout(node) is not None else None


def _layout(node: Node) -> object:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    # As text: comparing symbolic sizes would add guards.
    return (value.dtype, value.device, value.layout, str(value.shape), str(value.stride()))


def program_signature(program: ExportedProgram) -> Any:
    """Return the recorded signature of the outermost module, or None."""
    return program.module_call_graph[0].signature
