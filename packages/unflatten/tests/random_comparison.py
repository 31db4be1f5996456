"""Compare a random model with what its exported program unflattens to, in all that eager has."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import Any

import torch
from random_models import Case, Pair  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.utils import _pytree as pytree
from unflatten_comparison import assert_equal  # type: ignore[import-not-found]


def exported(
    model: nn.Module, case: Case, form: str, preserved: tuple[str, ...] = ()
) -> ExportedProgram:
    """Return the program of ``model`` in one form: strict or not, decomposed or not."""
    args, kwargs = case.arguments()
    with warnings.catch_warnings():
        # torch's own passes warn of torch's own deprecations.
        warnings.simplefilter("ignore")
        program: ExportedProgram = export(
            copy.deepcopy(model),
            args,
            kwargs,
            dynamic_shapes=dynamic_shapes(case),
            strict=form.startswith("strict"),
            preserve_module_call_signature=preserved,
        )
        if form.endswith("decomposed"):
            program = program.run_decompositions()
        elif form.endswith("functional"):
            program = program.run_decompositions({})
        return program


def dynamic_shapes(case: Case) -> Any:
    """Return which sizes of the arguments vary, as ``export`` takes it."""
    args, kwargs = case.arguments()
    rows = Dim("rows", min=2, max=64)

    def shape(leaf: Any) -> Any:
        if isinstance(leaf, Pair):
            return [shape(leaf.first), pytree.tree_map(shape, leaf.second)]
        return {0: rows} if isinstance(leaf, Tensor) else None

    if not case.dynamic:
        return None
    names = list(inspect.signature(case.model.forward).parameters)
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    return pytree.tree_map(shape, named, is_leaf=lambda leaf: isinstance(leaf, Pair))


def compare_calls(eager: nn.Module, subject: Callable[..., Any], case: Case, calls: int) -> None:
    """Assert equal results, arguments written alike, and equal state, over several calls."""
    for number in range(calls):
        mine, theirs = case.arguments(number), case.arguments(number)
        torch.manual_seed(number)
        expected = eager(*theirs[0], **theirs[1])
        torch.manual_seed(number)
        found = subject(*mine[0], **mine[1])
        assert_equal(found, expected)
        assert_equal(mine, theirs)
        if isinstance(subject, nn.Module):
            compare_values(subject, eager)


def compare_values(subject: nn.Module, eager: nn.Module) -> None:
    """Assert that each buffer of ``subject`` has the value of eager's."""
    expected = dict(eager.named_buffers(remove_duplicate=False))
    for name, value in subject.named_buffers(remove_duplicate=False):
        if name in expected:
            torch.testing.assert_close(
                value, expected[name], msg=f"{name} is {value}, not {expected[name]}"
            )


def gradients(module: Any, case: Case) -> dict[str, Tensor | None]:
    """Return the gradient of each parameter and argument."""
    args, kwargs = case.arguments()
    wanted = {name: value for name, value in module.named_parameters() if value.requires_grad}
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not case.model.writes:
        wanted.update((f"argument {n}", x.requires_grad_()) for n, x in enumerate(leaves))
    torch.manual_seed(0)
    results = pytree.tree_leaves(module(*args, **kwargs))
    floats = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
    if not floats or not wanted:
        return {}
    total: Any = sum(value.square().sum() for value in floats)
    found = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    return dict(zip(wanted, found, strict=True))


def compare_gradients(
    subject: nn.Module, eager: nn.Module, program: ExportedProgram, case: Case
) -> None:
    """Assert that gradients are eager's, or those of the program where it lost eager's.

    Export runs ``cond`` and loops under ``no_grad`` with gradients, and decomposing lets
    gradients through some views.
    """
    subject, eager = copy.deepcopy(subject), copy.deepcopy(eager)
    try:
        expected = gradients(eager, case)
    except RuntimeError:
        # Eager has none: it wrote what the gradient needs.
        return
    try:
        found = gradients(subject, case)
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        # Decomposing to no operator at all leaves some that have no gradient.
        return
    if all(is_close(found.get(name), value) for name, value in expected.items()):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            recorded = gradients(program.module(), case)
        except RuntimeError:
            # torch cannot make its own module of some programs.
            recorded = {}
    for name, value in expected.items():
        is_right = is_close(found.get(name), value) or (
            name in recorded and is_close(found.get(name), recorded[name])
        )
        assert is_right, f"the gradient of {name} is neither eager's nor the program's"


def is_close(found: Tensor | None, expected: Tensor | None) -> bool:
    """Return whether two gradients are alike; autocast rounds them to eight bits."""
    if found is None or expected is None:
        return all(value is None or not value.count_nonzero() for value in (found, expected))
    scale = max(float(expected.abs().max()), 0.05)
    return found.shape == expected.shape and torch.allclose(
        found, expected, rtol=2e-2, atol=2e-2 * scale
    )


def compare_structure(
    subject: nn.Module,
    eager: nn.Module,
    program: ExportedProgram,
    *,
    strict: bool,
    views: bool = True,
) -> None:
    """Assert eager's names, order, kinds and sharing of all state and of all modules.

    ``views`` tells whether tensors that share memory must still do so: pickle parts them.
    """
    assert list(subject.state_dict()) == list(eager.state_dict())
    parameters = dict(eager.named_parameters(remove_duplicate=False))
    found = dict(subject.named_parameters(remove_duplicate=False))
    assert list(found) == list(parameters)
    for name, value in found.items():
        assert value.requires_grad == parameters[name].requires_grad
    assert [name for name, _ in subject.named_parameters()] == [
        name for name, _ in eager.named_parameters()
    ]
    buffers = dict(eager.named_buffers(remove_duplicate=False))
    found_buffers = dict(subject.named_buffers(remove_duplicate=False))
    lost = lost_buffers(eager, program) if strict else set()
    # What its own module reads comes back under its own name.
    lost -= read_by_their_modules(eager, program)
    expected = [name for name in buffers if name in found_buffers or name not in lost]
    if strict:
        # Nothing tells where among the buffers of one module those were that are not saved.
        saved = subject.state_dict()
        assert modules_in_order(found_buffers) == modules_in_order(expected)
        assert [n for n in found_buffers if n in saved] == [n for n in expected if n in saved]
    else:
        assert list(found_buffers) == expected
    kept = {**parameters, **{name: buffers[name] for name in found_buffers}}
    named = {**found, **found_buffers}
    assert groups(named, id) == groups(kept, id)
    assert not views or groups(named, memory) == groups(kept, memory)
    compare_constants(subject, eager, program)
    compare_modules(subject, eager, program, strict=strict)


def compare_constants(subject: nn.Module, eager: nn.Module, program: ExportedProgram) -> None:
    """Assert that plain tensors are where eager has them."""
    for name in program.constants:
        outer, _, last = name.rpartition(".")
        value = vars(eager.get_submodule(outer)).get(last)
        if value is not None:
            torch.testing.assert_close(vars(subject.get_submodule(outer))[last], value)


def read_by_their_modules(eager: nn.Module, program: ExportedProgram) -> set[str]:
    """Return the buffers that a module with a name of its own in the program reads."""
    buffers = dict(eager.named_buffers(remove_duplicate=False))
    signature = program.graph_signature
    reads = set()
    for node in program.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if not stack:
            continue
        reader = next(reversed(stack.values()))[0]
        for source in node.all_input_nodes:
            target = signature.inputs_to_buffers.get(source.name)
            # Of one that another name saves, strict export keeps no further name.
            if target in buffers and target not in program.state_dict:
                reads.add((reader, id(buffers[target])))
    return {
        name for name, value in buffers.items() if (name.rpartition(".")[0], id(value)) in reads
    }


def modules_in_order(names: Iterable[str]) -> list[tuple[str, int]]:
    """Return the modules of some state in order, with the number of names in each."""
    return list(Counter(name.rpartition(".")[0] for name in names).items())


def lost_buffers(eager: nn.Module, program: ExportedProgram) -> set[str]:
    """Return the buffers whose names strict export did not keep.

    It keeps of each buffer that ``state_dict`` has not one name, the last, and that only where
    the program reads it.
    """
    kept = {*program.state_dict, *program.constants}
    buffers = dict(eager.named_buffers(remove_duplicate=False))
    lost = buffers.keys() - kept
    assert not lost & eager.state_dict().keys()
    saved = eager.state_dict().keys()
    for group in groups({n: b for n, b in buffers.items() if n not in saved}, id):
        assert len(lost.intersection(group)) in {0, len(group) - 1, len(group)}
        assert group[-1] not in lost or lost.issuperset(group)
    return lost


def memory(value: Tensor) -> int:
    """Return a number that tensors which share memory have in common."""
    return int(value.untyped_storage()._cdata)


def groups(named: Mapping[str, Any], key: Callable[[Any], object]) -> list[list[str]]:
    """Return the names of values with equal keys together, in order of first names."""
    found: dict[object, list[str]] = {}
    for name, value in named.items():
        found.setdefault(key(value), []).append(name)
    return list(found.values())


def compare_modules(
    subject: nn.Module, eager: nn.Module, program: ExportedProgram, *, strict: bool
) -> None:
    """Assert eager's modules in eager's order, one where eager has one.

    Export records what a module is called and which state it has, strict export also which calls
    are of one module. Two names of which it records neither cannot be known to be one.
    """
    expected = dict(eager.named_modules(remove_duplicate=False))
    found = dict(subject.named_modules(remove_duplicate=False))
    assert list(found) == list(expected)
    identities = recorded_identities(program)
    held = recorded_state(eager, [*program.state_dict, *program.constants])
    # Strict export keeps no buffer that is not saved of a module that is never called.
    kept = recorded_state(eager, program.state_dict) if strict else held
    for one, two in combinations(expected, 2):
        known = (identities.get(one), identities.get(two))
        is_one = found[one] is found[two]
        if expected[one] is expected[two] and not is_one:
            assert not held.get(one) or held.get(one) != held.get(two), f"{one} and {two} differ"
            assert not strict or None in known, f"{one} and {two} differ"
        if expected[one] is not expected[two] and is_one:
            assert not strict or None in known, f"{one} and {two} are one"
            assert kept[one] == kept[two], f"{one} and {two} are one"
    for name, module in found.items():
        type_name = getattr(module, "type_name", lambda: None)()
        if type_name is not None:
            assert type_name.endswith(type(expected[name]).__qualname__)


def recorded_identities(program: ExportedProgram) -> dict[str, str]:
    """Return for each module that the program calls what tells it from others."""
    found: dict[str, str] = {}
    for node in program.graph.nodes:
        for key, (path, _) in node.meta.get("nn_module_stack", {}).items():
            found.setdefault(path, key.partition("@")[0])
    return found


def recorded_state(
    eager: nn.Module, names: Iterable[str]
) -> dict[str, frozenset[tuple[str, int]]]:
    """Return for each module the state under it among ``names``: relative names and tensors."""
    found: dict[str, set[tuple[str, int]]] = {}
    for name in names:
        outer, _, last = name.rpartition(".")
        module = eager.get_submodule(outer)
        value = module._parameters.get(last, module._buffers.get(last))
        # Export keeps one name only of a tensor that is neither, and makes some of its own.
        if value is None:
            continue
        owner = name
        while "." in owner:
            owner = owner.rpartition(".")[0]
            found.setdefault(owner, set()).add((name[len(owner) :], id(value)))
    return {name: frozenset(items) for name, items in found.items()}


def calls_of(module: nn.Module, case: Case) -> int:
    """Return how many calls of submodules one call makes."""
    count = 0

    def note(*_: Any) -> None:
        nonlocal count
        count += 1

    hooks = [child.register_forward_hook(note) for child in module.modules()]
    args, kwargs = case.arguments()
    module(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return count
