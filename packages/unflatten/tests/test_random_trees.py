"""Random models give eager's values, mutations, state and names in every form of export."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
import zlib
from typing import Any

import pytest
import torch
from random_comparison import (  # type: ignore[import-not-found]
    compare_calls,
    compare_gradients,
    compare_structure,
    exported,
)
from random_leaves import WRITERS  # type: ignore[import-not-found]
from random_models import Case, Tree, random_case  # type: ignore[import-not-found]
from torch import nn
from torch.export import ExportedProgram

from lowerdeck.unflatten import UnflattenedModule, UnflattenError, unflatten
from lowerdeck_zoo.seeds import seeds

pytestmark = [
    # torch.cond looks at gradients of what is no leaf.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    # Tested below: such modules are not swapped.
    pytest.mark.filterwarnings("ignore:Decomposing this program lost:UserWarning"),
    pytest.mark.filterwarnings("ignore:An argument of .* seems to have been:UserWarning"),
    # Strict export records the types of before autocast for what autocast computes.
    pytest.mark.filterwarnings("ignore:Eager converts a value here:UserWarning"),
]

FORMS = (
    "non-strict",
    "strict",
    "non-strict decomposed",
    "strict decomposed",
    "non-strict functional",
    "strict functional",
)


def check(case: Case, form: str, preserved: tuple[str, ...], extra: str) -> None:
    """Compare a model in one form of export; ``extra`` names one more thing to be right."""
    program, form, preserved = export_as_possible(case, form, preserved)
    strict = form.startswith("strict")
    module, eager = unflatten(program), copy.deepcopy(case.model)
    compare_structure(module, eager, program, strict=strict)
    if extra == "copy":
        kept, module = module, copy.deepcopy(module)
        compare_structure(module, eager, program, strict=strict)
    elif extra == "pickle":
        kept, module = module, pickle.loads(pickle.dumps(module))
        compare_structure(module, eager, program, strict=strict, views=False)
    elif extra == "functional":
        module = unflatten(program, inplace=False)
    elif extra == "compile":
        compiled: Any = torch.compile(module, fullgraph=True, backend="eager")
        compare_calls(copy.deepcopy(case.model), compiled, case, 2)
        torch.compiler.reset()
        module = unflatten(program)
    elif extra == "again":
        module = export_again(module, case)
    elif extra == "upstream":
        compare_with_upstream(module, program, eager, case)
    elif extra == "swap":
        compare_swapped(program, case)
    steps = [step for tree in trees(eager) for _, step in tree.steps]
    # Decomposing loses some regions without gradients.
    if extra != "again" and (" " not in form or not {"no grad", "nested modes"} & {*steps}):
        compare_gradients(module, eager, program, case)
    compare_calls(eager, module, case, 3)
    if extra in {"copy", "pickle"}:
        # A copy's state is its own.
        compare_calls(copy.deepcopy(case.model), kept, case, 1)


def _holds_tracepoints(program: ExportedProgram) -> bool:
    return any(
        node.target is torch.ops.higher_order._export_tracepoint
        for module in program.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
    )


def export_as_possible(
    case: Case, form: str, preserved: tuple[str, ...]
) -> tuple[ExportedProgram, str, tuple[str, ...]]:
    """Return the program in the wanted form, or in the nearest one that torch can make.

    torch.export cannot preserve the signature of a module that is called in two ways, and cannot
    decompose a program that writes one buffer by two names or that leaves autocast. It fails then
    with errors of many types. The plainest form has to work.
    """
    plain = form.partition(" ")[0]
    for name, signatures in ((form, preserved), (form, ()), (plain, preserved), (plain, ())):
        try:
            program = exported(case.model, case, name, signatures)
            # A region without gradients loses the signatures of calls in it.
            if not signatures or not _holds_tracepoints(program):
                return program, name, signatures
        except Exception as error:
            last = error
    raise last


def export_again(module: nn.Module, case: Case) -> UnflattenedModule:
    """Return what an unflattened module becomes when it is exported and unflattened again."""
    again = unflatten(exported(module, case, "non-strict"))
    assert list(again.state_dict()) == list(case.model.state_dict())
    return again


def compare_swapped(program: ExportedProgram, case: Case) -> None:
    """Compare with eager's modules in the place of preserved ones that share nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = unflatten(program)
    preserved = [entry.fqn for entry in program.module_call_graph[1:] if entry.signature]
    if any("Decomposing this program lost" in str(one.message) for one in caught):
        return
    doubtful = " ".join(str(one.message) for one in caught)
    eager = copy.deepcopy(case.model)
    tensors = [
        *eager.named_parameters(remove_duplicate=False),
        *eager.named_buffers(remove_duplicate=False),
        *eager.named_modules(remove_duplicate=False),
    ]
    for name in preserved:
        if "@" in name or re.search(rf"\b{re.escape(name)}[, ]", doubtful):
            continue
        inside = {id(value) for held, value in tensors if f"{held}.".startswith(f"{name}.")}
        outside = {id(value) for held, value in tensors if not f"{held}.".startswith(f"{name}.")}
        if inside.isdisjoint(outside):
            outer, _, last = name.rpartition(".")
            module.get_submodule(outer)._modules[last] = eager.get_submodule(name)
    try:
        compare_calls(copy.deepcopy(case.model), module, case, 2)
    except UnflattenError:
        # A module reads what another one, or its own last call, computed on the way to new state.
        repeated = {name.rpartition("@")[0] for name in preserved if "@" in name}
        assert any("state" in step for tree in trees(eager) for _, step in tree.steps) or any(
            getattr(inner, "kind", "") in WRITERS
            for name in repeated.intersection(preserved)
            for inner in eager.get_submodule(name).modules()
        )


def trees(model: nn.Module) -> list[Any]:
    """Return the trees in a model."""
    return [module for module in model.modules() if isinstance(module, Tree)]


def compare_with_upstream(
    module: nn.Module, program: ExportedProgram, eager: nn.Module, case: Case
) -> None:
    """Assert that whatever torch's own function has right is here too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            upstream = torch.export.unflatten(program)
            compare_calls(copy.deepcopy(eager), upstream, case, 2)
        except Exception:
            # It fails, or gives other values than eager.
            return
    names = dict(module.named_modules(remove_duplicate=False))
    calls = dict(upstream.named_modules(remove_duplicate=False))
    # It makes submodules of branches and of further calls.
    assert names.keys() >= {name for name in calls if not _UPSTREAMS_OWN.search(name)}
    assert module.state_dict().keys() >= {
        name for name in upstream.state_dict() if "@" not in name
    }


_UPSTREAMS_OWN = re.compile(r"@|_graph_\d|_body_\d|_cond_\d|submod")

EXTRAS = ("", "copy", "functional", "upstream", "swap", "again", "pickle", "swap")


def check_seed(seed: int, cost: int, forms: tuple[str, ...]) -> None:
    """Compare what ``seed`` stands for."""
    case = random_case(seed, cost=cost)
    names = [name for name, _ in case.model.named_modules() if name]
    preserved = tuple(name for name in names if zlib.crc32(f"{seed} {name}".encode()) % 4 == 0)
    extra = "compile" if seed % 37 == 0 else EXTRAS[seed % len(EXTRAS)]
    if extra != "swap" and seed % 3:
        preserved = ()
    check(case, forms[seed // 8 % len(forms)], preserved, extra)


@pytest.mark.parametrize("seed", seeds(100))
def test_random_model(seed: int) -> None:
    check_seed(seed, 12, ("non-strict", "non-strict", *FORMS))


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(100, 1100))
def test_many_random_models(seed: int) -> None:
    check_seed(seed, 60, FORMS)
