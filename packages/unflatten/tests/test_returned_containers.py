"""Lists and dicts that modules return as they were given, or keep, and that others change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten


class Child(nn.Module):
    def __init__(self, act: Callable[..., Any]) -> None:
        super().__init__()
        self.act = act
        self.work = nn.Linear(4, 4)
        self.kept: Any = None

    def forward(self, *args: Any, **more: Any) -> Any:
        return self.act(self, *args, **more)


class Model(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Any], *acts: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run
        self.kids = nn.ModuleList(map(Child, acts))

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def total(values: Any) -> Any:
    return sum(torch.utils._pytree.tree_leaves(values))


def same(self: Any, held: Any) -> Any:
    return held


def beside(self: Any, x: Tensor, held: Any) -> Any:
    return self.work(x), held


def twice(self: Any, x: Tensor) -> Any:
    made = [self.work(x)]
    return made, made


def appends(self: Any, held: Any, x: Tensor) -> Tensor:
    held.append(self.work(x))
    return x + 1


def sets_key(self: Any, held: Any, x: Tensor) -> Tensor:
    held["x"] = self.work(x)
    return x + 1


def keeps(self: Any, held: Any) -> Any:
    self.kept = held
    return held[0] * 2


def another_changes_it(self: Any, x: Tensor) -> Any:
    held = [x]
    y = self.kids[1](self.kids[0](held), x)
    return y + total(held)


def the_caller_changes_it(self: Any, x: Tensor) -> Any:
    held = [x]
    y, again = self.kids[0](x, held)
    again.append(y)
    return y + total(held)


def by_keyword(self: Any, x: Tensor) -> Any:
    held = [x]
    y, again = self.kids[0](x, held=held)
    again[0] = y
    return y + total(held)


def a_dict(self: Any, x: Tensor) -> Any:
    held = {"x": x}
    y, again = self.kids[0](x, held)
    z = self.kids[1](again, x)
    return y + held["x"] + z


def an_inner_list(self: Any, x: Tensor) -> Any:
    held = [[x], x]
    y, again = self.kids[0](x, held)
    again[0].append(y)
    return y + total(held[0])


def a_part(self: Any, x: Tensor) -> Any:
    held = {"a": [x], "b": x}
    self.kids[0](held).append(x * 2)
    return total(held["a"])


def only_its_length(self: Any, x: Tensor) -> Any:
    held = [x]
    self.kids[0](held).append(x)
    return len(held) * x


def returned_twice(self: Any, x: Tensor) -> Any:
    one, other = self.kids[0](x)
    one.append(x * 2)
    return total(other)


def kept_by_the_module(self: Any, x: Tensor) -> Any:
    held = [x]
    y = self.kids[0](held)
    held.append(y)
    found = total(self.kids[0].kept)
    self.kids[0].kept = None
    return found


def through_two(self: Any, x: Tensor) -> Any:
    held = [x]
    again = self.kids[1](self.kids[0](held))
    again[0] = again[0] * 3
    return held[0] + x


MODELS = (
    *((another_changes_it, same, appends), (the_caller_changes_it, beside)),
    *((by_keyword, beside), (a_dict, beside, sets_key), (an_inner_list, beside)),
    *((a_part, lambda self, held: held["a"]), (only_its_length, same)),
    (returned_twice, twice),
    *((kept_by_the_module, keeps), (through_two, same, same)),
)


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("parts", MODELS, ids=lambda parts: parts[0].__name__)
def test_a_change_by_another_name_is_not_lost(parts: Any, strict: bool) -> None:
    """The copies that export records calls with made two of what is one."""
    eager, x = Model(*parts), torch.randn(3, 4)
    program = export_preserving(eager, (x,), strict=strict)
    module = unflatten(program)
    torch.testing.assert_close(module(x), eager(x))
    refused = {row.path: row.reason for row in module.swappable() if not row.replaceable}
    assert any("by another name" in why or "that it is given" in why for why in refused.values())
    for path in (path for path in refused if not path.endswith("work")):
        changed = copy.deepcopy(module)
        changed.set_submodule(path, nn.Tanh())
        with pytest.raises(UnflattenError, match=path):
            changed(x)


def only_reads(self: Any, x: Tensor) -> Any:
    held = [x]
    y, again = self.kids[0](x, held)
    held.append(y)  # which nobody reads by the other name
    return y + total(held) + again[0]


def test_what_nobody_reads_by_another_name_is_no_matter() -> None:
    eager, x = Model(only_reads, beside), torch.randn(3, 4)
    module: Any = unflatten(export_preserving(eager, (x,)))
    assert all(row.replaceable for row in module.swappable())
    module.set_submodule("kids.0", copy.deepcopy(eager.kids[0]))
    torch.testing.assert_close(module(x), eager(x))


def draws(self: Any, x: Tensor) -> Any:
    return [self.work(x) * self.drawn()]


def test_a_model_of_which_no_two_exports_are_one_keeps_its_signatures() -> None:
    numbers = iter(range(1, 99))
    eager, x = Model(lambda self, x: self.kids[0](x)[0], draws), torch.randn(3, 4)
    eager.kids[0].drawn = lambda: float(next(numbers))  # type: ignore[assignment]
    rows = unflatten(export_preserving(eager, (x,))).swappable()
    assert [row.path for row in rows if row.replaceable] == ["kids", "kids.0", "kids.0.work"]
