"""Change random models: replace, wrap and hook modules, of eager and of unflattened alike."""

from __future__ import annotations

import copy
import io
import random
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from random_comparison import compare_calls, dynamic_shapes  # type: ignore[import-not-found]
from random_leaves import SIZE, WRITERS, Pair  # type: ignore[import-not-found]
from random_models import Case, Tree, random_case  # type: ignore[import-not-found]
from random_odd_changes import check_odd_change  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.export import ExportedProgram, export
from torch.utils import _pytree as pytree
from unflatten_comparison import assert_equal  # type: ignore[import-not-found]

from lowerdeck.unflatten import SwapTable, UnflattenedModule, export_preserving, unflatten

FORMS = (
    "preserving",
    "decomposed preserving",
    "strict preserving",
    "functional preserving",
    "plain",
    "decomposed copied",
    "preserving",
    "decomposed loaded preserving",
    "copied",
    "functional plain all",
    "decomposed strict preserving",
    "plain all",
)
"""How a model is exported and unflattened: with all signatures, with none, without but for all.

What stands before that is done with the program, and "copied" with its unflattened form.
"""

DECOMPOSED: dict[str, Callable[[ExportedProgram], ExportedProgram]] = {
    "functional": lambda program: program.run_decompositions({}),
    "decomposed": lambda program: program.run_decompositions(),
}
"""What is done with an exported program; ``tests/changes`` adds what other packages do."""

REFUSALS = ("returned as", "returned what shares memory", "decomposing gave")
"""What a call may be refused with: a change returns what the module did not, or calls are lost."""

REPLACED = ("eager", "eager changed")
WRAPPED = (*("sequential", "changed", "low rank", "logged", "listed") * 2, "compiled")
HOOKED = ("hooked", "changed by a hook", "changed before")
MAY_BE = {"own hook": ("changed by a hook", *REPLACED), "own hook before": REPLACED}
"""What may be done with modules that have hooks of their own when they are exported."""

Call = tuple[str, Any]
Step = Callable[..., Any]


@dataclass
class Outcome:
    """What came of one seed.

    Attributes:
        seed: The seed.
        form: How it was exported, and "odd" if the model has odd layers and calls.
        changes: What was done, by how often.
        refused: Modules that the table refuses, by reason, and those that it allows.
        odd: A change that may be refused, and what came of it.
        outcome: "same", "refused" in a call, why nothing was compared, or "wrong".
        detail: What is wrong, or refused.
    """

    seed: int
    form: str
    changes: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    odd: tuple[str, str] = ("none", "same")
    outcome: str = "same"
    detail: str = ""


def check_seed(seed: int, cost: int = 20, form: str | None = None) -> Outcome:
    """Change the model of ``seed``, and compare.

    Args:
        seed: What the model and its changes are made of.
        cost: How many calls the model may have.
        form: One of ``FORMS``, and "odd" before it for odd models; by the seed if there is none.

    Raises:
        AssertionError: The two differ.
    """
    form = form or form_of(seed)
    made = Outcome(seed, form)
    case, rng = random_case(seed, cost=cost, odd="odd" in form), random.Random(seed + 1)
    program = _exported(case, made)
    if program is None:
        return made
    try:
        _check(case, program, made, rng)
    except Exception as error:
        made.detail = str(error)
        if made.changes and any(told in made.detail for told in REFUSALS):
            made.outcome = "refused"
        elif _is_eagers(case, program):
            raise
        else:
            made.outcome = "another program"
    return made


def form_of(seed: int, forms: Sequence[str] = FORMS) -> str:
    """Return what is done with the model of a seed: every other round of forms has odd ones."""
    round_, number = divmod(seed, len(forms))
    return ("odd " if round_ % 2 else "") + forms[number]


def is_decomposed(form: str) -> bool:
    """Return whether programs of a form are decomposed."""
    return not DECOMPOSED.keys().isdisjoint(form.split())


def _is_eagers(case: Case, program: ExportedProgram) -> bool:
    """Return whether a program, unchanged and run by torch, computes what eager does."""
    try:
        compare_calls(copy.deepcopy(case.model), program.module(), case, 3)
    except Exception:
        return False
    return True


def _check(case: Case, program: ExportedProgram, made: Outcome, rng: random.Random) -> None:
    module = unflatten(program, preserve="all" if "plain all" in made.form else None)
    table = module.swappable()
    told = [row.reason for row in table if row.called or not row.replaceable]
    made.refused = dict(Counter(map(_kind_of, told)))
    for number in range(2):
        changed = module if not number or "copied" not in made.form else copy.deepcopy(module)
        chosen = _chosen(case, module, table, made, rng)
        made.changes = dict(Counter(made.changes) + Counter(chosen.values()))
        _compare(case, changed, chosen, case.seed + number, made.form)
        module = unflatten(program, preserve="all" if "plain all" in made.form else None)
    if "plain" not in made.form:
        free = _free(case, table)
        made.odd = check_odd_change(case, module, free, _looked_at(case.model), rng)


def _free(case: Case, table: SwapTable) -> list[str]:
    """Return the modules around which, and in whose place, other ones may be put."""
    free = loose(case.model)
    return sorted(
        row.path
        for row in table
        if row.called
        and row.replaceable
        and row.callable_alone
        and free.get(row.path)
        and not isinstance(case.model.get_submodule(row.path), nn.Sequential)
        and row.path not in called_in_branches(case.model)
    )


def _exported(case: Case, made: Outcome) -> ExportedProgram | None:
    try:
        return exported(case, made.form)
    except Exception as error:
        # torch.export fails with errors of many types.
        made.outcome, made.detail = "no export", f"{type(error).__name__}: {error}"[:300]
        return None


def exported(case: Case, form: str) -> ExportedProgram:
    """Return the program of a model in a form."""
    args, kwargs = case.arguments()
    how = partial(export if "plain" in form else export_preserving, copy.deepcopy(case.model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shapes = dynamic_shapes(case)
        program = how(args, kwargs, dynamic_shapes=shapes, strict="strict" in form)
        for name in form.split():
            program = DECOMPOSED.get(name, _unchanged)(program)
        return _loaded(program) if "loaded" in form else program


def _unchanged(program: ExportedProgram) -> ExportedProgram:
    return program


def _loaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    # For its example arguments.
    with torch.serialization.safe_globals([Pair]):
        return torch.export.load(file)


def _kind_of(reason: str) -> str:
    words = [word for word in reason.split() if not any(letter.isdigit() for letter in word)]
    return " ".join(words[:12]) or "allowed"


def _chosen(
    case: Case, module: UnflattenedModule, table: SwapTable, made: Outcome, rng: random.Random
) -> dict[str, str]:
    """Return which modules are changed, and how: those within others first."""
    free = loose(case.model)
    is_plain = "plain" in made.form
    allowed = {row.path for row in table if row.called and (row.replaceable or is_plain)}
    # Forms that arguments do not tell are told by the caller, through what is around the module.
    alone = {row.path for row in table if row.callable_alone or "of which" in row.reason}
    told = {name for name, one in module.named_modules() if hasattr(one, "graph") and name}
    paths = sorted(allowed & told & free.keys() - called_in_branches(case.model))
    found: dict[str, str] = {}
    for path in sorted(rng.sample(paths, min(len(paths), rng.randint(1, 5)))):
        # Of a Sequential the trees call children too, which a module around it has not.
        is_container = isinstance(case.model.get_submodule(path), nn.Sequential)
        kinds: tuple[str, ...] = HOOKED
        if path in alone and not is_container:
            kinds = (*WRAPPED, *HOOKED)
        if "plain" in made.form:
            one = _returns_one(case.model.get_submodule(path))
            hooked = ("hooked", "changed by a hook") if one else ("hooked",)
            kinds = ("logged", *hooked) if "logged" in kinds else hooked
        elif free[path] and not any(outer_of(path, other) for other in found):
            kinds = (*kinds, *REPLACED, *REPLACED)
        # Hooks of eager's are a part of the module.
        own = getattr(case.model.get_submodule(path), "kind", "")
        if own.startswith("own hook"):
            kinds = tuple(kind for kind in kinds if kind in MAY_BE[own])
        if not kinds or any(outer_of(o, path) and found[o] in REPLACED for o in found):
            continue
        found[path] = rng.choice(kinds)
    return dict(sorted(found.items(), key=lambda item: -item[0].count(".")))


def _returns_one(module: nn.Module) -> bool:
    """Return whether flat results of a module are its result alone, and not what it handed on."""
    kind = getattr(module, "kind", "")
    hands_on = kind in {*WRITERS, "nothing", "shows", "gives view"} or kind.startswith("writes")
    return not (hands_on or isinstance(module, Tree))


def outer_of(outer: str, inner: str) -> bool:
    """Return whether a path is within another one."""
    return inner.startswith(outer + ".")


def loose(model: nn.Module) -> dict[str, bool]:
    """Return the modules of one name, and whether they share nothing with others.

    Export does not tell of every module with several names that it is one.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    names = Counter(id(module) for _, module in modules)
    held = [
        *modules,
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    memory = {name: value.untyped_storage()._cdata for name, value in held if _is_tensor(value)}
    # Nor of two that share all their state: they are one module of two names to it.
    alike = Counter(filter(None, (_alike(path, module, memory) for path, module in modules)))
    found = {}
    for path, module in modules:
        if not path or any(names[id(inner)] > 1 for inner in module.modules()):
            continue
        within = (
            (f"{path}.{name}" if name else path, one) for name, one in module.named_modules()
        )
        if any(alike[_alike(name, one, memory)] > 1 for name, one in within):
            continue
        inside = {memory.get(name, id(value)) for name, value in held if outer_of(path, name)}
        outside = {memory.get(name, id(value)) for name, value in held if not outer_of(path, name)}
        found[path] = inside.isdisjoint(outside)
    return found


def _alike(path: str, module: nn.Module, memory: Mapping[str, int]) -> object:
    """Return what is equal for two modules that export takes for one; None if it has no state."""
    names = (*module._parameters, *module._buffers)
    held = tuple(memory.get(f"{path}.{name}", 0) for name in names)
    return (type(module), held) if held else None


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _looked_at(model: nn.Module) -> set[str]:
    """Return the modules whose attributes a caller reads: another one's would be other ones."""
    return {
        ".".join((name, *path) if name else path)
        for name, tree in model.named_modules()
        for path, step in (tree.steps if isinstance(tree, Tree) else ())
        if "state" in step or step in {"half", "reads kept", "other weights"}
    }


def called_in_branches(model: nn.Module) -> set[str]:
    """Return the modules that a branch calls: the graph of a branch has no modules."""
    found = set()
    for name, tree in model.named_modules():
        for path, step in tree.steps if isinstance(tree, Tree) else ():
            if step == "branch calls":
                child = ".".join((name, *path) if name else path)
                found |= {
                    child,
                    *(f"{child}.{n}" for n, _ in model.get_submodule(child).named_modules()),
                }
    return found


def _compare(case: Case, subject: Any, chosen: Mapping[str, str], seed: int, form: str) -> None:
    eager, other = copy.deepcopy(case.model), copy.deepcopy(case.model)
    logs: tuple[list[Call], list[Call]] = ([], [])
    for path, kind in chosen.items():
        own = eager.get_submodule(path)
        around = _around(kind, path, seed)
        if kind in HOOKED:
            for module, log in zip((own, subject.get_submodule(path)), logs, strict=True):
                _hook(module, path, kind, log)
            continue
        outer, _, last = path.rpartition(".")
        parent = subject.get_submodule(outer)
        inner = parent._modules[last]
        own.forward = partial(around, logs[0], own.forward)
        if kind in REPLACED:
            inner = other.get_submodule(path)
            inner.forward = partial(around, logs[1], inner.forward)
            parent._modules[last] = inner
        elif kind == "sequential":
            parent._modules[last] = Sequential(inner)
        elif kind == "listed":
            parent._modules[last] = Listed(inner)
        elif kind == "compiled":
            parent._modules[last] = torch.compile(inner, backend="eager")
        else:
            parent._modules[last] = Around(inner, partial(around, logs[1]))
    compare_calls(eager, subject, case, 3)
    flat = "plain" in form
    if flat and is_decomposed(form):
        # Decomposing drops calls of whose results nothing but the size is read.
        return
    for path in chosen:
        expected, found = ([call for name, call in log if name == path] for log in logs)
        told = f"{path}: {len(found)} calls, not {len(expected)}"
        if flat:
            # Such calls take and return what the program does there, in an order of their own,
            # and may do nothing but ask for a size.
            assert len(found) >= len(expected), told
            continue
        assert len(found) == len(expected), told
        # Decomposing drops the write of an argument that nobody reads again.
        first = -1 if "odd" in form and is_decomposed(form) else 0
        for one, two in zip(found, expected, strict=True):
            assert_equal(one[first:], two[first:])


class Around(nn.Module):
    """What people put around a layer; it has the layer's attributes, as adapters have."""

    def __init__(self, inner: nn.Module, around: Step) -> None:
        super().__init__()
        self.inner = inner
        self.around = around

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.inner, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class Sequential(Around):
    """The layer in two containers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(nn.ModuleList([nn.ModuleDict({"held": inner})]), _plainly)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        held: Any = self.inner
        return held[0]["held"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            held: Any = nn.Module.__getattr__(self, "inner")
            return getattr(held[0]["held"], name)


class Listed(nn.Module):
    """The layer in a list in a list, where ``modules()`` does not see it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.held = [[inner]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.held[0][0](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["held"][0][0], name)


def _plainly(call: Step, *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


def _around(kind: str, path: str, seed: int) -> Step:
    """Return what a kind of change does around the call of a module."""
    torch.manual_seed(seed)
    down, up = torch.randn(SIZE, 2) / 4, torch.randn(2, SIZE) / 4

    def around(log: list[Call], call: Step, *args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        if kind == "low rank":
            tensors = filter(_is_tensor, pytree.tree_leaves((args, kwargs)))
            given = next(tensor for tensor in tensors if tensor.dim())
            with torch.no_grad():
                more = given.float() @ down @ up
            return _mapped(
                lambda leaf: leaf + more.to(leaf.dtype) if leaf.shape == more.shape else leaf,
                result,
            )
        if kind in {"changed", "eager changed"}:
            return _mapped(lambda leaf: leaf * 0.5, result)
        if kind == "logged" and _computes(args, kwargs, result):
            log.append((path, _noted(args, kwargs, result)))
        return result

    return around


def _hook(module: nn.Module, path: str, kind: str, log: list[Call]) -> None:
    if kind == "changed before":
        module.register_forward_pre_hook(
            lambda _, args, kwargs: _mapped(lambda leaf: leaf * 0.5, (args, kwargs)),
            with_kwargs=True,
        )
        return

    def after(_: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        if _computes(args, kwargs, result):
            log.append((path, _noted(args, kwargs, result)))
        return _mapped(lambda leaf: leaf * 0.5, result) if kind != "hooked" else None

    module.register_forward_hook(after, with_kwargs=True)


def _computes(args: Any, kwargs: Mapping[str, Any], result: Any) -> bool:
    """Return whether a call does anything: of one that does not, a program may have no call.

    Decomposed, it may return a copy (a dropout that drops nothing).
    """
    return not any(
        result is leaf or (_is_tensor(leaf) and _are_equal(result, leaf))
        for leaf in pytree.tree_leaves((args, kwargs))
    )


def _are_equal(one: Any, other: torch.Tensor) -> bool:
    is_alike = _is_tensor(one) and one.dtype is other.dtype and one.shape == other.shape
    return is_alike and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _mapped(change: Step, value: Any) -> Any:
    """Return ``value`` with its tensors of floating type changed."""
    return pytree.tree_map(
        lambda leaf: change(leaf) if _is_tensor(leaf) and leaf.is_floating_point() else leaf, value
    )


def _noted(args: Any, kwargs: Mapping[str, Any], result: Any) -> Any:
    named = sorted(kwargs.items())
    # Copies: what was passed may be written later.
    return pytree.tree_map(
        lambda leaf: leaf.detach().clone() if _is_tensor(leaf) else leaf, (args, named, result)
    )
