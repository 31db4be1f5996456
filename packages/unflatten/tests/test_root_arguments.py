"""Arguments of the outermost module: eager's arguments, checked against the exported ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from unflatten_zoo.judges import assert_same  # type: ignore[import-not-found]
from unflatten_zoo.models import structures  # type: ignore[import-not-found]

from lowerdeck.unflatten import (
    FlatArgsAdapter,
    InputConstraintError,
    InputStructureError,
    UnflattenError,
    unflatten,
)
from lowerdeck_zoo import saved_and_loaded

X = torch.randn(2, 4)
CASE = structures.CASES[0]


def test_arguments_are_taken_by_name_and_position() -> None:
    (args, kwargs), eager = CASE.calls()[0], CASE.module()
    module = CASE.unflattened()
    wanted = eager(*args, **kwargs)
    assert_same(module(*args, **kwargs), wanted)
    assert_same(module(options=args[1], pair=args[0], **kwargs), wanted)


@pytest.mark.parametrize("way", ["plain", "saved", "preserving"])
def test_other_arguments_are_named(way: str) -> None:
    (args, kwargs), module = CASE.calls()[0], CASE.unflattened(way)
    with pytest.raises(InputStructureError, match="options"):
        module(args[0], {"bias": torch.ones(3)}, **kwargs)
    with pytest.raises(TypeError, match="extra"):
        module(*args)
    with pytest.raises(TypeError, match="another"):
        module(*args, **kwargs, another=X)
    with pytest.raises(InputConstraintError, match=r"options\['bias'\].*\(3\).*found .*\(4\)"):
        module(args[0], {"bias": torch.ones(4), "unused": torch.ones(1)}, **kwargs)
    with pytest.raises(InputConstraintError, match=r"extra\[0\].*2.*found 3"):
        module(*args, extra=(3, torch.ones(())))
    with pytest.raises(InputConstraintError, match=r"pair\.first.*found .*\(2, 4\)"):
        module(structures.Pair(torch.ones(2, 4), args[0].second), args[1], **kwargs)
    module.check_input_constraints = False
    module(*args, extra=(3, torch.ones(())))


class Concat(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return torch.cat([x, y], 1)


def test_sizes_that_vary_are_checked() -> None:
    rows = Dim("rows", min=3, max=9)
    shapes = ({0: rows}, {0: rows, 1: Dim("columns")})
    program = export(Concat(), (torch.ones(4, 2), torch.ones(4, 5)), dynamic_shapes=shapes)
    for module in (unflatten(program), unflatten(saved_and_loaded(program))):
        assert module(torch.ones(3, 2), torch.ones(3, 7)).shape == (3, 9)
        refused = {
            r"y.*5|5.*y|4": (torch.ones(5, 2), torch.ones(4, 7)),
            "9": (torch.ones(10, 2), torch.ones(10, 7)),
            "3": (torch.ones(2, 2), torch.ones(2, 7)),
            "dimensions|rank|shape": (torch.ones(5), torch.ones(5, 7)),
        }
        for message, args in refused.items():
            with pytest.raises(InputConstraintError, match=message):
                module(*args)
        module.check_input_constraints = False
        assert module(torch.ones(1, 2), torch.ones(1, 7)).shape == (1, 9)


class Sums(nn.Module):
    def forward(self, x: Tensor, pair: Any) -> Any:
        return x + pair.first + pair.second[0]


def test_sizes_in_classes_are_checked() -> None:
    rows = {0: Dim("rows", max=9)}

    def of_sizes(*sizes: int) -> tuple[Any, ...]:
        x, first, second = (torch.ones(size, 4) for size in sizes)
        return x, structures.Pair(first, [second])

    program = export(Sums(), of_sizes(3, 3, 3), dynamic_shapes=(rows, [rows, [rows]]))
    module = unflatten(program)
    assert module(*of_sizes(5, 5, 5)).shape == (5, 4)
    for sizes, message in (((5, 4, 5), r"pair\.first"), ((10, 10, 10), "9")):
        with pytest.raises(InputConstraintError, match=message):
            module(*of_sizes(*sizes))


class Branches(nn.Module):
    """Follows one side of a comparison of sizes, which the program has alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        y = self.fc(y)
        return x.sum() + y if x.shape[0] < 2 * y.shape[0] else x.mean() - y


def test_the_side_of_a_branch_is_held_as_torch_holds_it() -> None:
    sizes = ({0: Dim("one", max=64)}, {0: Dim("other", max=64)})
    args = (torch.randn(5, 4), torch.randn(6, 4))
    eager = Branches()
    for program in (
        export(eager, args, dynamic_shapes=sizes),
        saved_and_loaded(export(eager, args, dynamic_shapes=sizes)),
    ):
        module = unflatten(program)
        for one, other in ((5, 6), (7, 4), (2, 9), (8, 4), (9, 3), (30, 2)):
            given = (torch.randn(one, 4), torch.randn(other, 4))
            if one < 2 * other:
                torch.testing.assert_close(module(*given), eager(*given))
                continue
            for subject in (module, program.module()):
                with pytest.raises((InputConstraintError, AssertionError)):
                    subject(*given)
            with pytest.raises(InputConstraintError):
                module(*given)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("exported", "passed"),
    [
        *((torch.float32, torch.int64), (torch.float32, torch.bool), (torch.int64, torch.int32)),
        *((torch.int64, torch.float32), (torch.bool, torch.uint8)),
    ],
)
def test_a_tensor_of_another_dtype_is_refused(
    exported: torch.dtype, passed: torch.dtype, bias: bool
) -> None:
    module = unflatten(export(Doubles(bias), (torch.ones(2, 4, dtype=exported),)))
    with pytest.raises(InputConstraintError, match=f"x.*{exported}.*{passed}"):
        module(torch.ones(2, 4, dtype=passed))
    module.check_input_constraints = False
    module(torch.ones(2, 4, dtype=passed))


class Doubles(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4)) if bias else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        y = x + x if self.bias is None else x + self.bias
        return y if mask is None else y * mask


def test_a_module_takes_the_dtype_that_it_was_moved_to() -> None:
    eager = Doubles(bias=True)
    module = unflatten(export(eager, (X,)))
    with pytest.raises(InputConstraintError, match=r"float32.*found.*float64"):
        module(X.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(module(X.bfloat16()), eager(X.bfloat16()))
    for dtype in (torch.float64, torch.bfloat16):
        assert_same(module.to(dtype)(X.to(dtype)), eager.to(dtype)(X.to(dtype)))


def test_what_was_exported_as_none_is_none() -> None:
    module = unflatten(export(Doubles(bias=True), (X, None)))
    assert_same(module(X, None), X)
    with pytest.raises(InputConstraintError, match=r"mask.*None.*found a torch.float32 tensor"):
        module(X, X)


class TakesFirst(FlatArgsAdapter):
    """Takes as many leaves as the program has inputs."""

    def adapt(
        self,
        target_spec: Any,
        input_spec: Any,
        input_args: list[Any],
        metadata: dict[str, Any] | None = None,
        obj: Any | None = None,
    ) -> list[Any]:
        return input_args[: target_spec.num_leaves]

    def get_flat_arg_paths(self) -> list[str]:
        return ["the_input"]


def test_an_adapter_turns_other_structures_into_the_exported_one() -> None:
    eager, x = nn.Linear(2, 2), torch.ones(1, 2)
    module = unflatten(export(eager, (x,)), TakesFirst())
    torch.testing.assert_close(module(x, "more"), eager(x))
    torch.testing.assert_close(module([x]), eager(x))
    with pytest.raises(InputConstraintError, match="the_input"):
        module(torch.ones(1, 3), "more")


class Scaled(nn.Module):
    def forward(self, x: Tensor, factor: float, many: list[Tensor]) -> Tensor:
        return x.reshape(-1, 4) * factor + many[0]


SCALED = (torch.ones(3, 4), 2.0, [torch.ones(4)])
OTHERS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "constant": lambda: (torch.ones(3, 4), 3.0, [torch.ones(4)]),
    "sign": lambda: (torch.ones(3, 4), -2.0, [torch.ones(4)]),
    "type": lambda: (torch.ones(3, 4), 2, [torch.ones(4)]),
    "rank": lambda: (torch.ones(3, 2, 4), 2.0, [torch.ones(4)]),
    "size": lambda: (torch.ones(3, 8), 2.0, [torch.ones(4)]),
    "size in a list": lambda: (torch.ones(3, 4), 2.0, [torch.ones(1)]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("other", OTHERS)
def test_a_compiled_module_refuses_them_too(other: str, fullgraph: bool) -> None:
    torch._dynamo.reset()
    dynamic = {"x": {0: Dim("n", max=9)}, "factor": None, "many": [None]}
    module = unflatten(export(Scaled(), SCALED, dynamic_shapes=dynamic))
    compiled: Any = torch.compile(module, fullgraph=fullgraph, dynamic=True, backend="eager")
    for args in (SCALED, (torch.ones(5, 4), *SCALED[1:])):
        torch.testing.assert_close(compiled(*args), Scaled()(*args))
    with pytest.raises(Exception, match=r"xport|dimensions|recorded") as caught:
        compiled(*OTHERS[other]())
    # In one graph the compiler reports what would have been raised.
    assert fullgraph or isinstance(caught.value, UnflattenError)
