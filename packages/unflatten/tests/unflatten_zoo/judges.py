"""Judges: each compares what an unflattened module does with what eager does in one use."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._export.verifier import SpecViolationError
from torch.export import export
from torch.utils import _pytree as pytree

from lowerdeck.unflatten import InterpreterModuleDispatcher, Swap, UnflattenedModule, unflatten
from unflatten_zoo.case import Case, Inputs  # type: ignore[import-not-found]


def assert_same(found: Any, expected: Any, tolerance: float | None = None) -> None:
    """Assert equal structures, types and constants, and close tensors; NaN equals NaN."""
    leaves, spec = pytree.tree_flatten(found)
    wanted, wanted_spec = pytree.tree_flatten(expected)
    assert spec == wanted_spec
    for leaf, want in zip(leaves, wanted, strict=True):
        if isinstance(want, Tensor):
            torch.testing.assert_close(leaf, want, atol=tolerance, rtol=tolerance, equal_nan=True)
        else:
            assert leaf == want or leaf is want or (leaf != leaf and want != want)


def run(module: Callable[..., Any], inputs: Inputs, seed: int = 0) -> Any:
    """Return what a module computes of copies of these inputs."""
    args, kwargs = copy.deepcopy(tuple(inputs))
    torch.manual_seed(seed)
    return module(*args, **kwargs)


def compare_calls(
    case: Case,
    subject: Callable[..., Any],
    eager: nn.Module | None = None,
    calls: list[Inputs] | None = None,
) -> None:
    """Assert equal results, and inputs written alike, in each call of the case in turn."""
    eager = case.module() if eager is None else eager
    for number, inputs in enumerate(case.calls() if calls is None else calls):
        mine, theirs = copy.deepcopy(tuple(inputs)), copy.deepcopy(tuple(inputs))
        torch.manual_seed(number)
        expected = eager(*theirs[0], **theirs[1])
        torch.manual_seed(number)
        found = subject(*mine[0], **mine[1])
        assert_same(found, expected, case.tolerance)
        assert_same(mine, theirs)
    if isinstance(subject, nn.Module):
        compare_values(case, subject, eager)


def compare_values(case: Case, subject: nn.Module, eager: nn.Module) -> None:
    """Assert that each parameter and buffer of both has one value."""
    expected = dict(state_of(eager))
    for name, value in state_of(subject):
        if name in expected:
            message = f"{name} differs after the calls: {{}}".format
            torch.testing.assert_close(
                value, expected[name], msg=message, atol=case.tolerance, rtol=case.tolerance
            )


def state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer under each of its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def judge_calls(case: Case, way: str) -> None:
    """Results, written inputs and written state of a program of one way are eager's."""
    try:
        made = case.unflattened(way)
    except SpecViolationError:
        # Torch refuses its own records of what decomposing renamed.
        assert way == "preserving decomposed"
        return
    compare_calls(case, made)


def judge_state(case: Case, way: str) -> None:
    """Names, order and sharing of modules and state are eager's."""
    made, eager = case.unflattened(way), case.module()
    assert list(made.state_dict()) == list(eager.state_dict())
    for kind in ("named_parameters", "named_buffers", "named_modules"):
        found = dict(getattr(made, kind)(remove_duplicate=False))
        wanted = dict(getattr(eager, kind)(remove_duplicate=False))
        assert list(found) == list(wanted), kind
        if kind != "named_modules" or way == "preserving":
            assert names_of_each(found) == names_of_each(wanted), kind
        if kind == "named_parameters":
            assert all(found[name].requires_grad == wanted[name].requires_grad for name in found)
    memory = {name: value.untyped_storage()._cdata for name, value in state_of(made)}
    wanted_memory = {name: value.untyped_storage()._cdata for name, value in state_of(eager)}
    assert names_of_each(memory, key=lambda x: x) == names_of_each(wanted_memory, key=lambda x: x)
    # State loads from eager, and into it.
    made.load_state_dict(eager.state_dict())
    eager.load_state_dict(made.state_dict())


def names_of_each(named: Mapping[str, Any], key: Callable[[Any], Any] = id) -> list[list[str]]:
    """Return the names of each value together, in the order of their first names."""
    groups: dict[Any, list[str]] = {}
    for name, value in named.items():
        groups.setdefault(key(value), []).append(name)
    return list(groups.values())


def judge_gradients(case: Case) -> None:
    """Gradients of parameters are eager's."""
    found, expected = (_gradients(module, case) for module in (case.unflattened(), case.module()))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        message = f"the gradient of {name} differs: {{}}".format
        torch.testing.assert_close(found[name], value, msg=message, atol=1e-4, rtol=1e-3)


def _gradients(module: nn.Module, case: Case) -> dict[str, Tensor]:
    leaves = pytree.tree_leaves(run(module, case.calls()[0]))
    floats = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    named = {name: value for name, value in module.named_parameters() if value.requires_grad}
    if not floats or not named:
        return {}
    total: Any = sum(leaf.abs().square().sum() for leaf in floats)
    grads = torch.autograd.grad(total, tuple(named.values()), allow_unused=True)
    pairs = zip(named, grads, strict=True)
    return {name: grad for name, grad in pairs if grad is not None and grad.count_nonzero()}


def rows_of(made: UnflattenedModule) -> list[Swap]:
    """Return the rows of the table whose modules may be replaced and are called."""
    return [row for row in made.swappable() if row.replaceable and row.called]


def marked_in(made: UnflattenedModule) -> set[str]:
    """Return the names of the called modules that may not be replaced."""
    return {row.path for row in made.swappable() if row.called and not row.replaceable}


def judge_table(case: Case) -> None:
    """Every module is in the table; those without a recorded call or signature say why."""
    made = case.unflattened("preserving")
    table = made.swappable()
    assert [row.path for row in table] == [name for name, _ in made.named_modules() if name]
    marked = marked_in(made)
    assert marked <= set(case.marked), f"also marked: {sorted(marked - set(case.marked))}"
    missing = set(case.marked) - {row.path for row in table if not row.replaceable}
    assert not missing, f"not marked: {sorted(missing)}"
    assert all(row.reason for row in table if not row.replaceable)
    assert len(str(table).splitlines()) == len(table)


def replace(model: nn.Module, path: str, other: nn.Module) -> None:
    """Put a module in the place of another one, by each name that the other one has."""
    before = model.get_submodule(path)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module is before:
            model.set_submodule(name, other)


def compare_changes(
    case: Case,
    change: Callable[[nn.Module, str, nn.Module], Any],
    made: UnflattenedModule | None = None,
) -> None:
    """Assert that changing one module at a time computes as in eager.

    Args:
        change: Changes a model at a path; its last argument is a copy of eager's module there.
        made: Whose copies are changed; that of ``export_preserving`` if None.
    """
    made = case.unflattened("preserving") if made is None else made
    original = case.module()
    for row in rows_of(made):
        mine, theirs = copy.deepcopy(made), copy.deepcopy(original)
        for model in (mine, theirs):
            change(model, row.path, copy.deepcopy(original.get_submodule(row.path)))
        try:
            compare_calls(case, mine, theirs)
        except Exception as error:
            error.add_note(f"after a change of {row.path!r}")
            raise


def judge_swaps(case: Case) -> None:
    """Each module may be replaced by eager's own."""
    compare_changes(case, replace)


class Around(nn.Module):
    """Passes on what it is given and the attributes of its inner module; scales float results."""

    def __init__(self, inner: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.inner, self.scale = inner, scale

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return scaled(self.inner(*args, **kwargs), self.scale)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def scaled(value: Any, scale: float) -> Any:
    """Return a tree with each tensor of floats multiplied."""

    def multiplied(leaf: Any) -> Any:
        return leaf * scale if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return value if scale == 1.0 else pytree.tree_map(multiplied, value)


def judge_wrapping(case: Case) -> None:
    """A wrapper around all modules changes nothing, and one that scales results scales eager's."""
    made = case.unflattened("preserving")
    for row in reversed(rows_of(made)):
        replace(made, row.path, Around(made.get_submodule(row.path)))
    compare_calls(case, made)
    if not case.lacks("changes"):
        wrap = lambda model, path, _: replace(  # noqa: E731
            model, path, Around(Around(model.get_submodule(path)), 1.25)
        )
        compare_changes(case, wrap)


@contextmanager
def recorded(model: nn.Module, paths: list[str]) -> Iterator[list[Any]]:
    """Record what the modules at some paths are given and return."""
    log: list[Any] = []
    handles = []
    for path in paths:

        def before(_: Any, args: Any, kwargs: Any, path: str = path) -> None:
            log.append((path, copied(args), copied(kwargs)))

        def after(_: Any, args: Any, kwargs: Any, result: Any, path: str = path) -> None:
            log.append((path, copied(result)))

        module = model.get_submodule(path)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield log
    finally:
        for handle in handles:
            handle.remove()


def copied(value: Any) -> Any:
    """Return a tree with copies of the tensors as they are now."""
    return pytree.tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value
    )


def judge_hooks(case: Case) -> None:
    """Hooks see what eager's see, and change what they change there."""
    made, eager = case.unflattened("preserving"), case.module()
    paths = [row.path for row in rows_of(made)]
    with recorded(made, paths) as found, recorded(eager, paths) as wanted:
        compare_calls(case, made, eager)
    # Calls of which none reads another's result may be in another order than in eager.
    for path in paths:
        mine, theirs = ([entry for entry in log if entry[0] == path] for log in (found, wanted))
        assert_same(mine, theirs, case.tolerance)
    if not case.lacks("changes"):

        def hook(model: nn.Module, path: str, _: nn.Module) -> None:
            module = model.get_submodule(path)
            module.register_forward_pre_hook(lambda *_: None)
            module.register_forward_hook(lambda _, args, result: scaled(result, 1.25))

        compare_changes(case, hook)


def judge_copies(case: Case) -> None:
    """Copies, pickles and files compute as eager, with separate state."""
    for way in ("plain", "preserving"):
        made = case.unflattened(way)
        subjects = [copy.deepcopy(made), pickle.loads(pickle.dumps(made))]
        if not case.lacks("files"):
            saved = io.BytesIO()
            torch.save(made, saved)
            saved.seek(0)
            subjects.append(torch.load(saved, weights_only=False))
        for subject in (*subjects, made):
            compare_calls(case, subject)
            names = [name for name, _ in subject.named_modules(remove_duplicate=False)]
            assert names == [name for name, _ in made.named_modules(remove_duplicate=False)]


def judge_compiled(case: Case) -> None:
    """torch.compile makes one graph of the whole, and of the whole with a module replaced."""
    torch._dynamo.reset()
    made = case.unflattened("preserving")
    compiled: Any = torch.compile(made, fullgraph=True, backend="eager")
    eager = case.module()
    # The second call is what compiling left behind.
    compare_calls(case, compiled, eager, [case.calls()[0]] * 2)
    compare_values(case, made, eager)
    if rows := rows_of(made):
        torch._dynamo.reset()
        made = case.unflattened("preserving")
        replace(made, rows[-1].path, Around(made.get_submodule(rows[-1].path)))
        compiled = torch.compile(made, fullgraph=True, backend="eager")
        compare_calls(case, compiled, calls=case.calls()[:1])


def judge_exported_again(case: Case) -> None:
    """An unflattened module is exported with the original dynamic shapes."""
    made = case.unflattened("preserving")
    args, kwargs = case.calls()[0]
    program = export(made, args, kwargs, dynamic_shapes=case.shapes)
    again = unflatten(program)
    assert list(again.state_dict()) == list(case.module().state_dict())
    compare_calls(case, again)


def judge_alone(case: Case) -> None:
    """Modules called alone with what eager's were given return what eager's return."""
    made, eager = case.unflattened("preserving"), case.module()
    paths = [row.path for row in rows_of(made) if row.callable_alone]
    single = [
        path
        for path in paths
        if not isinstance(made.get_submodule(path), InterpreterModuleDispatcher)
    ]
    calls: dict[str, list[Inputs]] = {}
    with recorded(eager, single) as log:
        for inputs in case.calls():
            run(eager, inputs)
    for path, *given in log:
        if len(given) == 2:
            calls.setdefault(path, []).append(Inputs(*given))
    for path, recorded_calls in calls.items():
        mine = case.unflattened("preserving").get_submodule(path)
        try:
            compare_calls(case, mine, case.module().get_submodule(path), recorded_calls)
        except Exception as error:
            error.add_note(f"in calls of {path!r} alone")
            raise


def judge_threads(case: Case) -> None:
    """Threads that call one module at once get separate results."""
    made, eager = case.unflattened("preserving"), case.module()
    for row in rows_of(made)[-1:]:
        replace(made, row.path, Around(made.get_submodule(row.path)))
    calls = case.calls() * 4
    wanted = [run(eager, inputs) for inputs in calls]
    with ThreadPoolExecutor(4) as pool:
        for found, want in zip(
            pool.map(lambda inputs: run(made, inputs), calls), wanted, strict=True
        ):
            assert_same(found, want, case.tolerance)
