"""Sizes that only numbers tell, found by calls that bind them and by calls that bind none.

torch remembers on a tensor how many of its elements are not zero: of two calls that find as many,
only the first binds a symbol.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from program_likeness import differences  # type: ignore[import-not-found]
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from lowerdeck.decompose import decompose, explain
from lowerdeck_zoo import Of, exported, saved_and_loaded

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning"),
]

X = torch.tensor([[1.0, -2.0, 0.0, 3.0], [0.0, 5.0, -6.0, 0.0], [1.0, 0.0, 0.0, 2.0]])


def _indexed(x: torch.Tensor) -> Any:
    mask = x > 0
    return x[torch.where(mask)], torch.where(mask), x[mask] + 1


def _used(x: torch.Tensor) -> Any:
    mask = x > 0
    (i, j), (k, column) = torch.where(mask), torch.where(mask)
    gathered = nn.functional.gelu(x[k, column])
    return gathered, x[i] * x[k], torch.cat([x[i], x[k]]), x[:, j].sum(1)


def _mask_written(x: torch.Tensor) -> Any:
    mask = x > 0
    first = torch.where(mask)
    mask.logical_not_()
    return first, torch.where(mask), torch.argwhere(mask)


def _written_by_both(x: torch.Tensor) -> Any:
    one, other = torch.where(x > 0), torch.where(x > 0)
    y = x.clone()
    y[one] = 1.0
    y.index_put_(other, torch.tensor(2.0), accumulate=True)
    return y, torch.stack(one, 1), torch.argwhere(x > 0)


def _input_written(x: torch.Tensor) -> Any:
    x[x > 0] = 0
    x[torch.where(x)] = 9
    return x.clone(), torch.argwhere(x), torch.where(x)


def _masked(x: torch.Tensor) -> Any:
    mask, y = x > 0, x.clone()
    y[mask] = x[mask] * 2
    y[mask] += 1
    return y, x.masked_select(mask), torch.masked_select(x, mask) * 3


def _of_rows(x: torch.Tensor) -> Any:
    rows = x[:, 0] > 0
    return x[rows].mean(0), x[rows, 1], x[rows].size(0), x[~rows].reshape(-1), x[rows].any()


def _repeated(x: torch.Tensor) -> Any:
    counts = x.abs().long()[:, 0] + 1
    first = torch.repeat_interleave(counts), x.repeat_interleave(counts, 0)
    return *first, torch.repeat_interleave(x, counts, dim=0), torch.repeat_interleave(counts)


def _items(x: torch.Tensor) -> Any:
    count: Any = x.sum().long().item()
    torch._check(count >= 0)  # type: ignore[no-untyped-call]
    torch._check(count < 100)  # type: ignore[no-untyped-call]
    return torch.zeros(count), torch.nonzero(x).shape[0] + count, torch.argwhere(x).shape[0]


LINES: dict[str, Callable[[torch.Tensor], Any]] = {
    "where twice": _indexed,
    "where used": _used,
    "mask written between": _mask_written,
    "written by both": _written_by_both,
    "input written": _input_written,
    "masked": _masked,
    "rows": _of_rows,
    "repeated": _repeated,
    "items": _items,
    "argwhere and nonzero": lambda x: (torch.argwhere(x) + 1, torch.nonzero(x) * 2),
    "nonzero and argwhere": lambda x: (torch.nonzero(x) * 2, torch.argwhere(x), torch.where(x)),
    "argwhere of three": lambda x: [*map(torch.argwhere, (x, x, x + 1, x * 1))],
    "as tuple": lambda x: (x.nonzero(as_tuple=True), x.nonzero(as_tuple=True), x.nonzero().t()),
    "nonzero_static": lambda x: (torch.nonzero_static(x, size=3), torch.nonzero(x), x.argwhere()),
    "unique": lambda x: (torch.unique(x), torch.unique(x, return_inverse=True), x.argwhere()),
    "unique rows": lambda x: (torch.unique(x, dim=0), torch.unique(x, dim=0), torch.where(x)),
    "bincount": lambda x: (x.abs().long().flatten().bincount(), torch.where(x), torch.where(x)),
}


def _exported(line: Callable[[torch.Tensor], Any], dims: Any = None) -> ExportedProgram:
    return exported(Of(line), X.clone(), dynamic_shapes=dims and (dims,))


def _bound(program: ExportedProgram) -> list[str]:
    nodes = program.graph.nodes
    return [str(s) for node in nodes for s in node.meta.get("unbacked_bindings", {})]


def _ran(program: ExportedProgram, x: torch.Tensor) -> list[Any]:
    given = x.clone()
    return [*pytree.tree_leaves(program.module()(given)), given]


@pytest.mark.parametrize(
    ("name", "dims"),
    [*((name, None) for name in LINES), *((name, ({0: Dim.AUTO},)) for name in [*LINES][::2])],
    ids=str,
)
def test_sizes_that_data_decide_are_as_torch_has_them(name: str, dims: Any) -> None:
    ours, theirs = (_exported(LINES[name], dims) for _ in range(2))
    found, expected = decompose(ours), theirs.run_decompositions()
    assert not differences(found, expected)
    assert len({*_bound(found)}) == len(_bound(found)) == len(_bound(expected))
    assert found.range_constraints == expected.range_constraints
    for x in (X, X.flip(1)):
        torch.testing.assert_close(_ran(found, x), _ran(theirs, x), equal_nan=True)


def test_what_goes_torchs_way_is_the_same_after_an_attempt() -> None:
    ours, theirs = (_exported(_indexed, ({0: Dim.AUTO},)) for _ in range(2))
    assert "unbacked sizes" in str(explain(ours).reason)
    assert not differences(decompose(ours), theirs.run_decompositions())


def _scaled(x: torch.Tensor) -> Any:
    return x * x.sum().item(), x.mean().item()


@pytest.mark.parametrize("way", ["core", "nothing", "keep", "its own"])
def test_item_stays_where_torch_keeps_it(way: str) -> None:
    item = torch.ops.aten.item.default
    core: Any = torch.export.default_decompositions()
    tables: Any = torch.export.default_decompositions()
    tables.pop(item)
    own: Any = {torch.ops.aten._local_scalar_dense.default: item}
    given, keep, theirs = {
        "core": (core, (), core),
        "nothing": ({}, (), {}),
        "keep": (None, (item,), tables),
        "its own": (own, (), own),
    }[way]
    program = _exported(_scaled)
    found = decompose(program, given, keep=keep)
    assert differences(found, program.run_decompositions(theirs)) == []
    assert len(found.graph.find_nodes(op="call_function", target=item)) == 2 * (way != "core")


def _fixed_count(x: torch.Tensor) -> Any:
    count: Any = (x > 0).sum().item()
    torch._check(count == 5)  # type: ignore[no-untyped-call]
    return x * count, x.new_zeros(count)


def _fixed_sum(x: torch.Tensor) -> Any:
    count: Any = (x > 0).sum().item()
    torch._check(2 * count + x.shape[0] == 13)  # type: ignore[no-untyped-call]
    return nn.functional.gelu(x) + count


def _number_of_rows(x: torch.Tensor) -> Any:
    count: Any = (x > 1).sum().item()
    torch._check(count == x.shape[0])  # type: ignore[no-untyped-call]
    return nn.functional.gelu(x) + count


def _fixed_boolean(x: torch.Tensor) -> Any:
    torch._check(((x > 0).sum() == 5).item())  # type: ignore[no-untyped-call]
    return nn.functional.gelu(x)


def _checked_tensor(x: torch.Tensor) -> Any:
    torch._check_tensor_all((x > 0).sum() == 5)  # type: ignore[no-untyped-call]
    return nn.functional.gelu(x)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(
    "function",
    [_fixed_count, _fixed_sum, _number_of_rows, _fixed_boolean, _checked_tensor],
)
def test_a_number_that_an_assertion_fixes_is_still_read_and_checked(
    function: Callable[[torch.Tensor], Any], loaded: bool
) -> None:
    program = _exported(function, ({0: Dim("rows")},) if function is _number_of_rows else None)
    if loaded:
        program = saved_and_loaded(program)
    assert explain(program).reason is None
    # Decomposed programs are decomposed again by whoever lowers them.
    once = decompose(program)
    for found in (once, decompose(once)):
        module = found.module()
        torch.testing.assert_close(module(X), function(X))
        with pytest.raises(RuntimeError, match=r"assert|not five"):
            module(X.abs())
