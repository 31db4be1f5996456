"""Calls that write several tensors, some of which overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from program_likeness import assert_as_eager  # type: ignore[import-not-found]
from torch.export import Dim

from lowerdeck.decompose import DecomposeError, decompose, explain
from lowerdeck_zoo import Of, exported

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
X = torch.arange(16.0).view(4, 4)


@torch.library.custom_op("lowerdeck_decompose_tests::grow_both", mutates_args=("x", "y"))
def grow_both(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(1)
    y.mul_(2)


@torch.library.custom_op("lowerdeck_decompose_tests::grow_and_read", mutates_args=("x",))
def grow_and_read(x: torch.Tensor, y: list[torch.Tensor]) -> torch.Tensor:
    x.mul_(2)
    return y[-1] + 1


@grow_and_read.register_fake
def _(_: torch.Tensor, y: list[torch.Tensor]) -> torch.Tensor:
    return torch.empty_like(y[-1])


def model(line: Callable[..., Any], *, whole: bool = False) -> Of:
    """Return a module of one line on a copy of its input and the input."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        if whole:
            # torch functionalizes this write by the whole of the memory, and so the program.
            grow_and_read((x + 1)[0], [x])
        y = x.clone()
        line(y, x)
        return y

    return Of(forward)


ONE_AFTER_THE_OTHER: dict[str, Any] = {
    "a part and the whole": lambda y, x: torch._foreach_add_([y[0], y], 1),
    "twice": lambda y, x: torch._foreach_mul_([y, y], 2),
    "a view of another type": lambda y, x: torch._foreach_zero_([y[0], y.view(torch.int32)]),
    "rows and columns": lambda y, x: torch._foreach_mul_([y[0], y[:, 0]], 2),
    "read at a later step": lambda y, x: torch._foreach_add_([y[0], x[1] + 0], [x[0], y[0]]),
    "read at each step": lambda y, x: torch._foreach_mul_([y[0], y[1]], y[0, 0]),
    "by one kernel": lambda y, x: grow_both(y, y[1]),
    "read by a custom kernel": lambda y, x: y.copy_(grow_and_read(y, [x, y])),
    "a part is read": lambda y, x: y.add_(grow_and_read(y[0], [y[:, 0]]).sum()),
    "taken one by one": lambda y, x: y.masked_scatter_(y > 0, y),
    "taken from a part": lambda y, x: y.masked_scatter_(x > 0, y.t()),
    "as results": lambda y, x: torch.aminmax(x, dim=0, out=(y[0], y[0])),
}
THROUGH_WINDOWS: dict[str, Any] = {
    "itself": lambda y, x: y.as_strided((2, 2), (1, 1)).mul_(2),
    "a part": lambda y, x: y.as_strided((2, 2), (1, 1))[:, 1:].mul_(2),
    "rows": lambda y, x: y.as_strided((3, 6), (4, 1))[0].add_(x[0, 0]),
}
EACH_BY_ITSELF: dict[str, Any] = {
    "rows": lambda y, x: torch._foreach_add_(list(y), 1),
    "columns": lambda y, x: torch._foreach_mul_(list(y.unbind(1)), 2),
    "steps": lambda y, x: torch._foreach_add_([y[:, ::2], y[:, 1::2]], [x[:, ::2], x[:, 1::2]]),
    "itself": lambda y, x: torch._foreach_add_([y[0], y[1]], [y[0], y[1]]),
    "read at an earlier step": lambda y, x: torch._foreach_add_([y[0], y[1]], [y[1], x[0]]),
    "by one kernel": lambda y, x: grow_both(y, x + 0),
    "a clone is read": lambda y, x: y.copy_(grow_and_read(y, [y.clone()])),
    "taken from another": lambda y, x: y.masked_scatter_(y > 0, x),
    "others are read": lambda y, x: y[2].copy_(grow_and_read(y[0], [y[1], y[2]])),
    "by a kernel of torch": lambda y, x: y.addcmul_(y, y).add_(y.t()[0]),
}


@pytest.mark.parametrize(
    ("name", "dynamic"), [(name, i % 4 == 0) for i, name in enumerate(ONE_AFTER_THE_OTHER)]
)
def test_what_is_written_one_after_the_other_is_refused(name: str, dynamic: bool) -> None:
    dims = (({0: Dim("rows", min=3)},),) if dynamic else None
    program = exported(model(ONE_AFTER_THE_OTHER[name]), torch.ones(4, 4), dynamic_shapes=dims)
    for ask in (decompose, explain):
        with pytest.raises(DecomposeError, match="one after the other that overlap"):
            ask(program)


@pytest.mark.parametrize("line", THROUGH_WINDOWS.values(), ids=THROUGH_WINDOWS)
@pytest.mark.parametrize("whole", [False, True])
def test_writes_through_windows_that_overlap_are_refused(line: Any, whole: bool) -> None:
    program = exported(model(line, whole=whole), torch.ones(4, 4))
    with pytest.raises(DecomposeError, match="shows an element of its memory more than once"):
        decompose(program)


@pytest.mark.parametrize("whole", [False, True])
def test_windows_that_overlap_may_be_read(whole: bool) -> None:
    def told(y: torch.Tensor, x: torch.Tensor) -> None:
        windows = y.as_strided((3, 6), (4, 1))
        y[1].mul_(2)
        y[0].add_(windows[1, :4])

    assert_as_eager(model(told, whole=whole), X)


def test_the_same_by_another_name_is_refused_on_the_way_of_torch() -> None:
    program = exported(model(lambda y, x: grow_both(y, y[1]), whole=True), torch.ones(4, 4))
    with pytest.raises(DecomposeError, match="one after the other that overlap"):
        decompose(program)


@pytest.mark.parametrize("line", EACH_BY_ITSELF.values(), ids=EACH_BY_ITSELF)
def test_parts_that_do_not_overlap_are_written_by_one_call(line: Any) -> None:
    assert_as_eager(model(line), X)
