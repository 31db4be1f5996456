"""Compare with ``torch.export.unflatten``: equal where it is right; where it is wrong, we are not.

Each test of the second half asserts torch's own failure too, so that we see when it is mended.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.unflatten import unflatten as torch_unflatten
from unflatten_zoo import CASES  # type: ignore[import-not-found]
from unflatten_zoo.judges import assert_same, run  # type: ignore[import-not-found]
from unflatten_zoo.models.calls import Chooses  # type: ignore[import-not-found]

from lowerdeck.unflatten import InputConstraintError, unflatten

# torch's own: each of its calls warns of deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")


BY_NAME = {str(case): case for case in CASES}


# Equal where torch is right


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("name", ["resnet", "vit", "llama_like", "mlp", "transformer"])
def test_values_are_torchs(name: str, strict: bool) -> None:
    case = BY_NAME[name]
    program = case.program("strict" if strict else "plain")
    # torch's writes into the program that it is given.
    mine, theirs = unflatten(program), torch_unflatten(copy.deepcopy(program))
    inputs = case.calls()[0]
    assert_same(run(theirs, inputs), run(mine, inputs), case.tolerance)
    assert set(mine.state_dict()) == set(theirs.state_dict())


# Where torch is wrong


def _outcome(run: Callable[[], Any], expected: Any) -> str:
    """Return what becomes of torch's: the name of an error, "wrong", or "right"."""
    try:
        torch.testing.assert_close(run(), expected)
    except AssertionError:
        return "wrong"
    except Exception as error:
        return type(error).__name__
    return "right"


# Of each way, cases of the zoo of which torch's computes something else or fails.
WRONG = {
    "plain": ("chooses", "views of one memory", "split by mode", "vmapped"),
    "functional": ("reads an old value",),
}


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for way, names in WRONG.items() for name in names]
)
def test_programs_for_which_torchs_is_wrong(name: str, way: str) -> None:
    case = BY_NAME[name]
    inputs, wanted = case.calls()[0], run(case.module(), case.calls()[0])
    program = copy.deepcopy(case.program(way.replace("functional", "decomposed")))
    assert_same(run(case.unflattened(way), inputs), wanted)
    assert _outcome(lambda: run(torch_unflatten(program), inputs), wanted) != "right"


def test_a_call_counter_after_an_exception_and_after_a_direct_call() -> None:
    model, x = Chooses(), torch.randn(2, 4)
    program = export(model, (x,), preserve_module_call_signature=("expert",))
    for disturb in (_fail, _call_child):
        mine, theirs = unflatten(program), torch_unflatten(program)
        for module in (mine, theirs):
            disturb(module, x)
        torch.testing.assert_close(mine(x), model(x))
        assert _outcome(partial(theirs, x), model(x)) != "right"


def _fail(module: nn.Module, x: Tensor) -> None:
    hook = module.get_submodule("expert").register_forward_hook(_raise)
    with pytest.raises(ValueError, match="on purpose"):
        module(x)
    hook.remove()


def _raise(*_: Any) -> None:
    raise ValueError("on purpose")


def _call_child(module: nn.Module, x: Tensor) -> None:
    # Ours has no counter: it refuses the call, and asks for one of call_modules().
    with suppress(InputConstraintError):
        module.get_submodule("expert")(x, True)


def _linear() -> tuple[nn.Module, Tensor, ExportedProgram]:
    eager, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.randn(3, 2)
    return eager, x, export(eager, (x,), dynamic_shapes=({0: Dim("batch", min=2, max=8)},))


def _pickled(module: nn.Module, x: Tensor) -> Any:
    return pickle.loads(pickle.dumps(module))(x)


def _compiled(module: nn.Module, x: Tensor) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend="eager")(x)


def _exported_again(module: nn.Module, x: Tensor) -> Any:
    shapes = ({0: Dim("batch", min=2, max=8)},)
    return export(module, (x,), dynamic_shapes=shapes).module()(x)


@pytest.mark.parametrize("use", [_pickled, _compiled, _exported_again])
def test_uses_for_which_torchs_fails(use: Callable[[nn.Module, Tensor], Any]) -> None:
    eager, x, program = _linear()
    torch.testing.assert_close(use(unflatten(program), x), eager(x))
    assert _outcome(lambda: use(torch_unflatten(program), x), eager(x)) != "right"
