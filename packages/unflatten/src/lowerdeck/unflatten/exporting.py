"""Export a model with the call signature of each of its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram, export
from torch.fx import traceback

from lowerdeck.torch_base import SYMBOLS, HigherOrderOperator, graphs_of, pytree
from lowerdeck.unflatten._torch_private import hooks_in_forward
from lowerdeck.unflatten.errors import UnsupportedProgramError
from lowerdeck.unflatten.notes import MODULE_NUMBERS, NOT_RECORDED, PASS_THROUGH
from lowerdeck.unflatten.swaps import refusal_of

_TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set")
"""Attributes of a module with its state."""

_IN_BRANCH = "is called in a branch or a loop, whose graph has no calls of modules"


def export_preserving(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    **options: Any,
) -> ExportedProgram:
    """Return ``model`` exported with the call signature of each module.

    The modules of ``unflatten(program)`` are then called like eager's: each can be called alone,
    hooked, wrapped, and replaced by an eager module. Export cannot record a module that takes or
    returns text, a symbolic number or an object of an unknown class, that changes a container
    which it is given, or that is called in a branch: ``swappable()`` names these modules.

    Args:
        model: The model; as for ``torch.export.export``.
        args: Example arguments.
        kwargs: Example keyword arguments.
        dynamic_shapes: The dynamic sizes.
        **options: Further options of ``torch.export.export``.

    Returns:
        The program. It costs one export, or three where some module cannot be recorded.

    Raises:
        UnsupportedProgramError: ``model`` is no module, or ``preserve_module_call_signature`` is
            among the options.

    Example:
        >>> import torch
        >>> from lowerdeck.unflatten import export_preserving, unflatten
        >>> eager = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> module = unflatten(export_preserving(eager, (torch.ones(1, 2),)))
        >>> module.set_submodule("1", torch.nn.Tanh())
        >>> bool((module(torch.ones(1, 2)) == torch.tanh(eager[0](torch.ones(1, 2)))).all())
        True
    """
    if not isinstance(model, torch.nn.Module):
        raise UnsupportedProgramError(
            f"expected a torch.nn.Module to export; found a {type(model).__name__}."
        )
    if "preserve_module_call_signature" in options:
        raise UnsupportedProgramError(
            "found preserve_module_call_signature among the options; export_preserving records "
            "the signature of every module: leave it out, or call torch.export.export."
        )
    # Every name of a shared module: export records a call by the name under which it is made.
    modules = {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if path and not refusal_of(module)
    }
    observed = _Observed()

    def run(paths: Sequence[str]) -> ExportedProgram:
        shapes = {"dynamic_shapes": dynamic_shapes, **options}
        keywords = dict(kwargs) if kwargs is not None else None
        names = tuple(paths)
        with _state_restored(model), _observing(modules, names, observed):
            return export(model, args, keywords, preserve_module_call_signature=names, **shapes)

    with ExitStack() as stack:
        for module in dict.fromkeys(modules.values()):
            stack.enter_context(hooks_in_forward(module))
        program = _export_recordable(run, list(modules), observed)
    if observed.unrecordable:
        _store_note(program, NOT_RECORDED, observed.unrecordable)
    if numbers := _numbers_of_tied(model):
        _store_note(program, MODULE_NUMBERS, numbers)
    _drop_unused_names(program, model)
    return program


@dataclass
class _Observed:
    """Modules whose signature cannot be recorded, with the reason."""

    unrecordable: dict[str, str] = field(default_factory=dict)


def _export_recordable(
    run: Callable[[Sequence[str]], ExportedProgram], paths: Sequence[str], observed: _Observed
) -> ExportedProgram:
    """Return the program with the signatures of all modules that can be recorded."""
    try:
        program = run(paths)
    except Exception:
        # torch's error does not name the module: observe all of them without signatures.
        plain = run(())
        if not observed.unrecordable:
            raise
    else:
        if not observed.unrecordable:
            return program
        plain = program
    recordable = [path for path in paths if path not in observed.unrecordable]
    try:
        return run(recordable)
    except Exception as error:
        reason = f"has a signature with which torch.export fails ({type(error).__name__})"
        observed.unrecordable.update(dict.fromkeys(recordable, reason))
        return plain


@contextmanager
def _state_restored(model: torch.nn.Module) -> Iterator[None]:
    """Restore the tensors of all modules: an export may leave fake ones there.

    Models that compute buffers by the sequence length do so. Other attributes stay: those of
    transformers record which hooks are installed.
    """
    states = [vars(module) for module in model.modules()]
    tables = [(state[name], state[name].copy()) for state in states for name in _TABLES]
    tensors = [(state, _tensors_in(state)) for state in states]
    try:
        yield
    finally:
        for table, values in tables:
            table.clear()
            table.update(values)
        for state, known in tensors:
            for name in _tensors_in(state).keys() - known.keys():
                del state[name]
            state.update(known)


def _tensors_in(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


@contextmanager
def _observing(
    modules: Mapping[str, torch.nn.Module], recorded: Sequence[str], observed: _Observed
) -> Iterator[None]:
    """Record which modules cannot be recorded, and mark results that are arguments."""
    names = set(recorded)
    with ExitStack() as stack:
        for path, module in modules.items():
            before, after = _hooks(path, path in names, observed)
            handle = module.register_forward_pre_hook(before, with_kwargs=True)
            stack.callback(handle.remove)
            handle = module.register_forward_hook(after, with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _hooks(
    path: str, is_recorded: bool, observed: _Observed
) -> tuple[Callable[..., None], Callable[..., Any]]:
    """Return the hooks of one module."""
    unrecordable = observed.unrecordable
    structures: list[object] = []
    arguments: list[list[Any]] = []

    # A hook's side effect in a branch would be refused; this function is called while tracing,
    # and not traced.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def note_branch() -> None:
        unrecordable[path] = _IN_BRANCH

    def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_dynamo_compiling():
            arguments.append([pytree.tree_flatten(value) for value in (*args, *kwargs.values())])

    def after(
        _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if not torch.compiler.is_exporting():
                note_branch()
                return None
            return _mark_pass_through(args, kwargs, result) if is_recorded else None
        for value, (leaves, spec) in zip((*args, *kwargs.values()), arguments.pop(), strict=True):
            now, now_spec = pytree.tree_flatten(value)
            if spec != now_spec or any(map(_differ, leaves, now)):
                unrecordable.setdefault(path, f"changes a {type(value).__name__} in place")
        taken, in_spec = pytree.tree_flatten((args, kwargs))
        returned, out_spec = pytree.tree_flatten(result)
        for verb, leaves in (("takes", taken), ("returns", returned)):
            other = next((leaf for leaf in leaves if not _is_recordable(leaf)), None)
            if other is not None:
                unrecordable.setdefault(path, f"{verb} {_describe(other)}")
        structures.append((in_spec, out_spec))
        if structures[0] != structures[-1]:
            unrecordable.setdefault(path, "is called with arguments of several structures")
        return _mark_pass_through(args, kwargs, result) if is_recorded else None

    return before, after


def _mark_pass_through(args: Any, kwargs: Any, result: Any) -> Any:
    """Return the result with aliases for tensors that are arguments; None if there are none.

    A program has one node for an argument and a result that are the same tensor, and no node of a
    module that only returns its argument.
    """
    is_tensor = torch.Tensor
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, is_tensor)]

    def is_given(leaf: Any) -> bool:
        return isinstance(leaf, is_tensor) and any(leaf is other for other in given)

    if not any(map(is_given, pytree.tree_leaves(result))):
        return None
    return pytree.tree_map(lambda leaf: _alias(leaf) if is_given(leaf) else leaf, result)


def _alias(leaf: torch.Tensor) -> Any:
    # Strict export keeps annotations of nodes, non-strict export must be asked to.
    is_strict = torch.compiler.is_dynamo_compiling()
    with nullcontext() if is_strict else traceback.preserve_node_meta():
        with traceback.annotate({PASS_THROUGH: True}):
            return torch.ops.aten.alias.default(leaf)


def _differ(one: object, other: object) -> bool:
    return one is not other


def _is_recordable(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, (torch.Tensor, bool, int, float))


def _describe(leaf: object) -> str:
    if isinstance(leaf, SYMBOLS):
        return "a symbolic number, which export cannot record"
    if isinstance(leaf, str):
        return f"the text {leaf!r}, which export cannot record"
    return f"an object of class {type(leaf).__name__}, which is not a pytree node"


def _numbers_of_tied(model: torch.nn.Module) -> dict[str, int]:
    """Return a number for each name of modules of one type that share their state.

    A module without state has one if it has several names.
    """
    alike: dict[object, dict[str, int]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if not path:
            continue
        tensors = (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        state = tuple([(name, id(tensor)) for name, tensor in tensors])
        alike.setdefault((type(module), state or id(module)), {})[path] = id(module)
    numbers: dict[int, int] = {}
    return {
        path: numbers.setdefault(identity, len(numbers))
        for names in alike.values()
        if len(names) > 1
        for path, identity in names.items()
    }


def _store_note(program: ExportedProgram, key: str, notes: Mapping[str, Any]) -> None:
    """Store facts about modules in metadata that saved programs keep.

    Args:
        program: The program.
        key: The kind of fact.
        notes: The facts, by module name.
    """
    nodes = [node for held in graphs_of(program.graph_module) for node in held.graph.nodes]
    first = next((node for node in nodes if node.op == "call_function"), None)
    for node in nodes:
        stack = node.meta.get("nn_module_stack") or {}
        paths = {path for path, _ in stack.values()}
        if node is first or isinstance(node.target, HigherOrderOperator):
            paths = set(notes)
        own = {path: notes[path] for path in paths if path in notes}
        if own:
            node.meta["custom"] = {**(node.meta.get("custom") or {}), key: own}


def _drop_unused_names(program: ExportedProgram, model: torch.nn.Module) -> None:
    """Drop the signatures of names by which a shared module is never called.

    Export records them without leaves.
    """
    signed = [entry for entry in program.module_call_graph if entry.fqn and entry.signature]
    used = [entry for entry in signed if entry.signature.inputs or entry.signature.outputs]
    modules = dict(model.named_modules(remove_duplicate=False))
    called = {id(modules.get(entry.fqn)) for entry in used}
    for entry in signed:
        if entry not in used and id(modules.get(entry.fqn)) in called:
            entry.signature = None
