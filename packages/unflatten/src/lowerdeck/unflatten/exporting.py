"""Export a model so that each of its modules can be taken out and put back."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram, ModuleCallSignature, export

from lowerdeck.torch_base import (
    SYMBOLS,
    HigherOrderOperator,
    graphs_of,
    pytree,
)
from lowerdeck.unflatten._torch_private import hooks_inside
from lowerdeck.unflatten.calls.carrying import (
    ALL_ASKED,
    IN_BRANCHES,
    LOST_CHANGES,
    MODULE_NUMBERS,
    NOT_RECORDED,
)
from lowerdeck.unflatten.comparing import compute_the_same
from lowerdeck.unflatten.errors import UnsupportedProgramError
from lowerdeck.unflatten.modules import watch_all
from lowerdeck.unflatten.same_results import drop_other_aliases, has_told_apart, results_aliased

_TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set")
"""Where a module of torch holds its state."""


def export_preserving(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    **options: Any,
) -> ExportedProgram:
    """Return ``model`` exported with the signature of each module that it calls.

    The modules of ``unflatten(program)`` are then called as eager's: each can be called alone,
    hooked, wrapped, and replaced by an eager module. A module that is called with what export
    cannot record (a size that varies, text, an object of an unknown class), that changes a list,
    dict or cache that it is given, or hands on one that is changed by another name, or with whose
    signature torch's export fails though it works without, is exported without its signature;
    ``swappable`` of the unflattened module says which and why.

    Args:
        model: The model; as for ``torch.export.export``.
        args: Example arguments.
        kwargs: Example keyword arguments.
        dynamic_shapes: Which sizes vary.
        **options: Further options of ``torch.export.export``.

    Returns:
        The program. It costs one export; one more where a module is given or returns a list, dict
        or cache, and one more where it is given or returns a tensor twice; three or four where
        some signature cannot be recorded, and some for each module with whose signature torch's
        export fails or loses a change.

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
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]

    def exported(recorded: Sequence[str], *, apart: bool = False, **more: Any) -> ExportedProgram:
        given = {"dynamic_shapes": dynamic_shapes, **options, **more}
        taken = dict(kwargs) if kwargs is not None else None
        names = tuple(recorded)
        with _state_kept(model), results_aliased(model, names, apart=apart):
            return export(model, args, taken, preserve_module_call_signature=names, **given)

    with ExitStack() as stack:
        watch_all(model)
        # Export records arguments as pre-hooks return them, but these leave with their module.
        for module in dict.fromkeys(map(model.get_submodule, paths)):
            stack.enter_context(hooks_inside(module))
        program = _with_signatures(exported, model, paths, strict=bool(options.get("strict")))
    drop_other_aliases(program)
    _note(program, ALL_ASKED, {"*": True})
    if numbers := _numbers_of_tied(model):
        _note(program, MODULE_NUMBERS, numbers)
    return _without_unused_names(program, model)


@contextmanager
def _state_kept(model: torch.nn.Module) -> Iterator[None]:
    """Give modules back the tensors that they held: what an export puts there are fakes.

    Models do so that choose their frequencies by the length, and another export would not take
    them; torch's own leaves them there. Other attributes stay: those of transformers tell which
    hooks they have put on themselves.
    """
    modules = [vars(module) for module in model.modules()]
    kept = [(held[name], held[name].copy()) for held in modules for name in _TABLES]
    tensors = [(held, _tensors_in(held)) for held in modules]
    try:
        yield
    finally:
        for table, values in kept:
            table.clear()
            table.update(values)
        for held, known in tensors:
            for name in _tensors_in(held).keys() - known.keys():
                del held[name]
            held.update(known)


def _tensors_in(held: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def _with_signatures(
    exported: Callable[..., ExportedProgram],
    model: torch.nn.Module,
    paths: Sequence[str],
    *,
    strict: bool,
) -> ExportedProgram:
    """Return the program with all signatures that can be recorded, and a note why not others.

    Args:
        exported: Exports with signatures.
        model: The model.
        paths: The names of its modules.
        strict: Whether ``exported`` does so strictly.
    """
    try:
        program = exported(paths, apart=True)
        if has_told_apart(program):
            # A module may compute something else for two tensors than for one twice.
            as_one = exported(paths)
            if compute_the_same(program, as_one):
                exported = partial(exported, apart=True)
            else:
                program = as_one
    except Exception:
        # Which module it was is found by exporting without: torch's error does not say.
        # Strict export leaves out what hooks note.
        with _watched(model, paths) as watched:
            plain = exported((), strict=False)
        if strict:
            plain = exported(())
        found = {**watched.strange, **watched.changed}
    else:
        # Export records each call with copies of the containers that it is given and returns, and
        # so loses without a word what is put there by another name.
        if not _with_containers(program):
            return program
        found = {}
        try:
            with _watched(model, paths) as watched:
                plain = exported((), strict=False)
            found = watched.changed
        except Exception:
            # Only strict export works.
            if not strict:
                raise
        if strict:
            plain = exported(())
        if not found and compute_the_same(program, plain):
            return program
    program, more = _with_most(exported, _names_of_modules(model, found), plain)
    _note(program, NOT_RECORDED, {**found, **more})
    return program


def _with_containers(program: ExportedProgram) -> set[str]:
    """Return the modules that are given or return what values can be put into."""
    return {
        entry.fqn.partition("@")[0]
        for entry in program.module_call_graph
        if entry.fqn and entry.signature and any(map(_can_be_filled, _handed(entry.signature)))
    }


def _handed(signature: ModuleCallSignature) -> list[pytree.TreeSpec]:
    given = [given for kind in signature.in_spec.children() for given in kind.children()]
    return [*given, signature.out_spec]


def _can_be_filled(spec: pytree.TreeSpec) -> bool:
    fixed = spec.is_leaf() or spec.type is tuple or spec.type is namedtuple
    return not fixed or any(map(_can_be_filled, spec.children()))


def _names_of_modules(model: torch.nn.Module, known: Container[str]) -> list[list[str]]:
    """Return the names of each module but those of ``known``; export fails with some of them."""
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if path and path not in known:
            names.setdefault(id(module), []).append(path)
    return list(names.values())


def _with_most(
    exported: Callable[[Sequence[str]], ExportedProgram],
    modules: Sequence[list[str]],
    plain: ExportedProgram,
) -> tuple[ExportedProgram, dict[str, str]]:
    """Return the program with all signatures with which torch's export works, and why not others.

    It fails in its own passes for some, and computes something else with others, and does not say
    for which: they are looked for by halves. A model that two exports without signatures find to
    be two is compared with nothing.

    Args:
        exported: Exports with signatures.
        modules: The names of each module.
        plain: The program without signatures.
    """
    kept: list[str] = []
    found: dict[str, str] = {}
    waiting = [list(modules)] if modules else []
    is_repeatable: bool | None = None
    program = plain
    while waiting:
        tried = waiting.pop()
        names = [name for module in tried for name in module]
        try:
            made = exported([*kept, *names])
        except Exception as error:
            why = f"has a signature with which torch.export fails ({type(error).__name__})"
        else:
            if is_repeatable is not False and not compute_the_same(made, plain):
                if is_repeatable is None:
                    is_repeatable = compute_the_same(exported(()), plain)
                why = LOST_CHANGES if is_repeatable else ""
            else:
                why = ""
            if not why:
                program = made
                kept += names
                continue
        if len(tried) == 1:
            found.update((name, why) for name in names)
        else:
            half = len(tried) // 2
            waiting += [tried[half:], tried[:half]]
    return program, found


def _numbers_of_tied(model: torch.nn.Module) -> dict[str, int]:
    """Return a number for each name of modules of one type that hold the same state.

    A module without any state has one if it has several names.
    """
    alike: dict[object, dict[str, int]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        held = (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        if path:
            state = tuple((name, id(tensor)) for name, tensor in held)
            key = state if held else id(module)
            alike.setdefault((type(module), key), {})[path] = id(module)
    tied = [names for names in alike.values() if len(names) > 1]
    numbers: dict[int, int] = {}
    return {
        path: numbers.setdefault(identity, len(numbers))
        for names in tied
        for path, identity in names.items()
    }


def _note(program: ExportedProgram, key: str, found: Mapping[str, Any]) -> None:
    """Note what is known of modules where saved programs keep it: in nodes' meta.

    Args:
        program: The program.
        key: The name of the note.
        found: What is known, by the modules' names.
    """
    nodes = [node for held in graphs_of(program.graph_module) for node in held.graph.nodes]
    stacks = [
        [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()] for node in nodes
    ]
    # Those that have no node are told by branches and loops, which may hold it, and by the first.
    rest = sorted(found.keys() - {path for stack in stacks for path in stack})
    first = next((node for node in nodes if node.op == "call_function"), None)
    for node, stack in zip(nodes, stacks, strict=True):
        more = rest if node is first or isinstance(node.target, HigherOrderOperator) else []
        told = {path: found[path] for path in (*stack, *more) if path in found}
        if told:
            custom = dict(node.meta.get("custom") or {})
            node.meta["custom"] = {**custom, key: told}


def _without_unused_names(program: ExportedProgram, model: torch.nn.Module) -> ExportedProgram:
    """Drop the signatures of names by which a shared module is never called; return ``program``.

    Export gives these names signatures without leaves, as if something had lost the leaves.
    """
    signed = [entry for entry in program.module_call_graph if entry.fqn and entry.signature]
    used = [entry for entry in signed if entry.signature.inputs or entry.signature.outputs]
    modules = dict(model.named_modules(remove_duplicate=False))
    called = {id(modules.get(entry.fqn)) for entry in used}
    for entry in signed:
        if entry not in used and id(modules.get(entry.fqn)) in called:
            entry.signature = None
    return program


@dataclass
class _Watched:
    """Which modules cannot be recorded, and why.

    Attributes:
        strange: Those called with, or that return, what export cannot record: it fails with them.
        changed: Those that change a container that they are given: export loses the change.
    """

    strange: dict[str, str] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)


@contextmanager
def _watched(model: torch.nn.Module, paths: Sequence[str]) -> Iterator[_Watched]:
    """Note which modules cannot be recorded while the model is exported without signatures."""
    watched = _Watched()
    with ExitStack() as stack:
        for path in paths:
            module = model.get_submodule(path)
            before, after = _watching(path, watched)
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        yield watched


def _watching(path: str, watched: _Watched) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the hooks that note what becomes of a module's arguments, and what it returns."""
    found = watched.strange
    structures: list[object] = []
    given: list[list[_Held]] = []

    # What a hook notes in a branch is a side effect, which tracing refuses; this is called while
    # tracing, and not traced.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def note_branch() -> None:
        found[path] = IN_BRANCHES

    def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_dynamo_compiling():
            given.append([_held(value) for value in (*args, *kwargs.values())])

    def after(
        _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if torch.compiler.is_dynamo_compiling():
            note_branch()
            return
        values = (*args, *kwargs.values())
        for value, held in zip(values, given.pop(), strict=True):
            if not _is_same(_held(value), held):
                changed = f"changes a {type(value).__name__} that it is given"
                watched.changed.setdefault(path, changed)
        taken, in_spec = pytree.tree_flatten((args, kwargs))
        returned, out_spec = pytree.tree_flatten(result)
        for what, leaves in (("takes", taken), ("returns", returned)):
            stranger = next((leaf for leaf in leaves if not _is_recordable(leaf)), None)
            if stranger is not None:
                found.setdefault(path, f"{what} {_described(stranger)}")
        structures.append((in_spec, out_spec))
        if structures[0] != structures[-1]:
            found.setdefault(path, "is called with arguments of several structures")

    return before, after


_Held = tuple[list[Any], pytree.TreeSpec]
"""The leaves of a value, and its structure."""


def _held(value: object) -> _Held:
    return pytree.tree_flatten(value)


def _is_same(one: _Held, other: _Held) -> bool:
    pairs = zip(one[0], other[0], strict=False)
    return one[1] == other[1] and all(mine is its for mine, its in pairs)


def _is_recordable(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, (torch.Tensor, bool, int, float))


def _described(leaf: object) -> str:
    if isinstance(leaf, SYMBOLS):
        return "a number that varies"
    if isinstance(leaf, str):
        return f"the text {leaf!r}"
    return f"an object of class {type(leaf).__name__}, which is no pytree node"
