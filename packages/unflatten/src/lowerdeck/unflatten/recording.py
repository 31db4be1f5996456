"""Record module calls while torch.export traces a model.

torch's ``preserve_module_call_signature`` adds tracepoints to the graph, which slow export down.
The hooks here look up the node of each value and write the signatures into the finished program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import ConstantArgument, TensorArgument
from torch.fx import traceback

from lowerdeck.torch_base import SYMBOLS, assume_constant_result, graphs_of, pytree
from lowerdeck.unflatten._torch_private import call_being_traced, node_of
from lowerdeck.unflatten.metadata import INNER, LEAVES, PASS_THROUGH

_VALUE = "lowerdeck_value"
"""Meta key of a call leaf: its node name during tracing. Later passes rename nodes but copy their
meta.
"""

_IN_BRANCH = "is called in a branch or a loop, whose graph has no calls of modules"

_Leaves = tuple[list[Any], pytree.TreeSpec]
_Leaf = TensorArgument | ConstantArgument | torch.Tensor
"""A node's name during tracing, a constant, or a tensor outside the graph."""


@dataclass(slots=True)
class _Call:
    """One recorded call of a module.

    Attributes:
        path: Name under which the module is called.
        values: Arguments, each with its leaves before the call, to detect mutations.
        arguments: Leaves of all arguments.
        in_spec: Structure of ``(args, kwargs)``.
        inputs: Recorded leaves of the arguments.
        outputs: Recorded leaves of the result.
        out_spec: Structure of the result.
    """

    path: str
    values: list[tuple[Any, _Leaves]]
    arguments: list[Any]
    in_spec: pytree.TreeSpec
    inputs: list[_Leaf]
    outputs: list[_Leaf] = field(default_factory=list)
    out_spec: pytree.TreeSpec | None = None


class Recorder:
    """Records module calls in a non-strict export.

    Args:
        modules: Modules by each of their names.

    Attributes:
        refusals: Why modules cannot be recorded.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self.names: dict[torch.nn.Module, list[str]] = {}
        for name, module in modules.items():
            self.names.setdefault(module, []).append(name)
        self.refusals: dict[str, str] = {}
        self.calls: dict[str, _Call] = {}
        self.containers: list[tuple[list[str], Any, _Leaves]] = []

    def record(self, export: Callable[[], ExportedProgram]) -> ExportedProgram:
        """Return the program that ``export`` returns, with the recorded signatures."""
        self.calls, self.containers = {}, []
        with ExitStack() as stack:
            for module, names in self.names.items():
                if names[0] not in self.refusals:
                    hooks = _Hooks(self, names)
                    # Our hooks run outside the model's own, which belong to the module.
                    how = {"with_kwargs": True, "prepend": True}
                    stack.callback(module.register_forward_pre_hook(hooks.before, **how).remove)
                    stack.callback(module.register_forward_hook(hooks.after).remove)
            program = export()
        is_changed = False
        for names, container, leaves in self.containers:
            if _differ(pytree.tree_flatten(container), leaves):
                self.refuse(names, "returns a container that is mutated afterwards")
                is_changed = True
        if is_changed:
            # The model may have mutated a copy with marked results.
            return self.record(export)
        self._write(program)
        return program

    def refuse(self, names: list[str], reason: str) -> None:
        """Record why modules cannot be recorded."""
        for name in names:
            self.refusals.setdefault(name, reason)

    def _write(self, program: ExportedProgram) -> None:
        names = _final_names(program)
        lifted = program.graph_signature.inputs_to_lifted_tensor_constants
        constants = {id(program.constants[target]): name for name, target in lifted.items()}

        def final(leaf: _Leaf) -> Any:
            if isinstance(leaf, ConstantArgument):
                return leaf
            # A dropped, unused value has no name.
            if isinstance(leaf, TensorArgument):
                return TensorArgument(names.get(leaf.name, ""))
            return TensorArgument(constants.get(id(leaf), ""))

        entries = {entry.fqn: entry for entry in program.module_call_graph}
        for name, call in self.calls.items():
            if call.path in self.refusals or call.out_spec is None:
                continue
            inputs, outputs = list(map(final, call.inputs)), list(map(final, call.outputs))
            in_spec, out_spec = _rebuilt(call.in_spec), _rebuilt(call.out_spec)
            signature = ModuleCallSignature(inputs, outputs, in_spec, out_spec)
            if name not in entries:
                program.module_call_graph.append(entries.setdefault(name, ModuleCallEntry(name)))
            entries[name].signature = signature


class _Hooks:
    """The hooks of one module."""

    def __init__(self, recorder: Recorder, names: list[str]) -> None:
        self.recorder = recorder
        self.names = names
        self.structure: object = None

    # Export rejects side effects of hooks in a branch; this function is called, not traced.
    @assume_constant_result
    def note_branch(self) -> None:
        """Record that the module is called in a branch or a loop."""
        for name in self.names:
            self.recorder.refusals[name] = _IN_BRANCH

    def before(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the arguments of a call."""
        if torch.compiler.is_dynamo_compiling():
            self.note_branch()
            return
        path, name = call_being_traced()
        if path not in self.names:
            return
        values = [(value, pytree.tree_flatten(value)) for value in (*args, *kwargs.values())]
        arguments, in_spec = pytree.tree_flatten((args, kwargs))
        inputs = self.leaves("takes", arguments)
        self.recorder.calls[name] = _Call(path, values, arguments, in_spec, inputs)

    def after(self, _: torch.nn.Module, __: tuple[Any, ...], result: Any) -> Any:
        """Record the result of a call; return it with pass-through aliases, or None to keep it."""
        if torch.compiler.is_dynamo_compiling():
            return None
        call = self.recorder.calls.get(call_being_traced()[1])
        if call is None:
            return None
        for value, leaves in call.values:
            if _is_mutable(leaves[1]) and _differ(pytree.tree_flatten(value), leaves):
                self.recorder.refuse(self.names, f"mutates a {type(value).__name__}")
        returned, call.out_spec = pytree.tree_flatten(result)
        if self.structure not in (None, (call.in_spec, call.out_spec)):
            self.recorder.refuse(
                self.names, "has calls with arguments or results of several structures"
            )
        self.structure = (call.in_spec, call.out_spec)
        marked = _mark_pass_through(call.path, call.arguments, result)
        for container in (result, marked) if _is_mutable(call.out_spec) else ():
            entry = (self.names, container, pytree.tree_flatten(container))
            self.recorder.containers.append(entry)
        if marked is not None:
            returned = pytree.tree_leaves(marked)
        call.outputs = self.leaves("returns", returned)
        call.values, call.arguments = [], []
        return marked

    def leaves(self, verb: str, values: list[Any]) -> list[_Leaf]:
        """Return the recorded leaves; refuse the module for unsupported values.

        Args:
            verb: ``"takes"`` or ``"returns"``, for the reason.
        """
        leaves: list[_Leaf] = []
        for value in values:
            node = node_of(value) if isinstance(value, torch.Tensor) else None
            if node is not None:
                node.meta[_VALUE] = node.name
                leaves.append(TensorArgument(node.name))
            elif value is None or isinstance(value, (bool, int, float)):
                leaves.append(ConstantArgument("", value))
            elif isinstance(value, torch.Tensor):
                leaves.append(value)
            else:
                self.recorder.refuse(self.names, f"{verb} {_describe(value)}")
        return leaves


def _final_names(program: ExportedProgram) -> dict[str, str]:
    """Map the names that call leaves had during tracing to their names in the program.

    Node names are unique within one graph only. A leaf in the nested graph of a mode region gets
    a unique id, which is stored in ``meta["custom"]`` of its node.
    """
    names: dict[str, str] = {}
    for module in graphs_of(program.graph_module):
        for node in module.graph.nodes:
            value = node.meta.pop(_VALUE, None)
            if value is None or value in names:
                continue
            names[value] = node.name
            if module is not program.graph_module:
                names[value] = f"{INNER}:{value}"
                node.meta["custom"] = {**(node.meta.get("custom") or {}), INNER: names[value]}
    return names


def note_inner_leaves(program: ExportedProgram) -> None:
    """Move the leaves of signatures that are in nested graphs to ``meta["custom"]`` of nodes.

    A saved program's signatures can name only nodes of the root graph.
    """
    notes: dict[str, dict[str, Any]] = {}
    for entry in program.module_call_graph:
        signature: Any = entry.signature
        leaves = (*signature.inputs, *signature.outputs) if signature is not None else ()
        inner = [leaf.name for leaf in leaves if leaf.name.startswith(INNER)]
        if inner:
            parts = (signature.inputs, signature.outputs)
            lists = [[getattr(leaf, "value", [leaf.name]) for leaf in part] for part in parts]
            notes.setdefault(inner[0], {})[entry.fqn] = lists
            signature.inputs, signature.outputs = [], []
    for module in graphs_of(program.graph_module) if notes else ():
        for node in module.graph.nodes:
            custom = node.meta.get("custom") or {}
            if custom.get(INNER) in notes:
                node.meta["custom"] = {**custom, LEAVES: notes[custom[INNER]]}


def _mark_pass_through(path: str, arguments: list[Any], result: Any) -> Any:
    """Return the result with pass-through tensors replaced by aliases; None if there are none.

    Without an alias, an argument and an identical result share one node, and a module that only
    returns its argument has none.
    """
    arguments = [leaf for leaf in arguments if isinstance(leaf, torch.Tensor)]

    def is_argument(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and any(leaf is other for other in arguments)

    if not any(map(is_argument, pytree.tree_leaves(result))):
        return None
    return pytree.tree_map(lambda leaf: _alias(leaf, path) if is_argument(leaf) else leaf, result)


def _alias(leaf: torch.Tensor, path: str) -> Any:
    # Export keeps node annotations only on request.
    with traceback.preserve_node_meta(), traceback.annotate({PASS_THROUGH: path}):
        return torch.ops.aten.alias.default(leaf)


def _is_mutable(spec: pytree.TreeSpec) -> bool:
    """Return whether a structure contains a mutable container."""
    if spec.is_leaf() or spec.type in {tuple, torch.Size}:
        return any(map(_is_mutable, spec.children()))
    return True


def _differ(one: _Leaves, other: _Leaves) -> bool:
    """Return whether a container's leaves have changed."""
    return one[1] != other[1] or any(
        first is not second and (isinstance(first, torch.Tensor) or first != second)
        for first, second in zip(one[0], other[0], strict=True)
    )


def _describe(leaf: object) -> str:
    if isinstance(leaf, SYMBOLS):
        return "a symbolic number, which export cannot record"
    if isinstance(leaf, str):
        return f"the text {leaf!r}, which export cannot record"
    return f"an object of class {type(leaf).__name__}, which is not a pytree node"


def _rebuilt(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    """Return ``spec`` as after a save and load by torch: a ``torch.Size`` becomes a tuple."""
    if not _has_size(spec):
        return spec
    return pytree.tree_structure(pytree.tree_unflatten(range(spec.num_leaves), spec))


def _has_size(spec: pytree.TreeSpec) -> bool:
    return spec.type is torch.Size or any(map(_has_size, spec.children()))
