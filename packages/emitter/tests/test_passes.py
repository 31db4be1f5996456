"""Kernels that programs call: what passes fold, merge, share or drop, with the right numbers."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter as Counts
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emitter_running import check, kernels  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim

import lowerdeck.emitter
from lowerdeck.emitter import OFFICIAL_KERNELS, EmitConfig, emit
from lowerdeck.emitter.ir.graph import Kernel
from lowerdeck.emitter.ir.runtime_ops import SCALAR_KERNELS
from lowerdeck.emitter.passes.fold_constants import is_repeatable
from lowerdeck.serializer import runtime_kernels
from lowerdeck_zoo import Holding, Of, exported
from lowerdeck_zoo.models.state import Counter
from lowerdeck_zoo.models.strides import attend, heads, joined


def _split(x: Tensor) -> Any:
    y = x + 1
    first, second = torch.split(y, [1, 3])
    return first.unsqueeze(0) * 2, second.view(-1) * 2, y[2] * 2, y[1:3] * 2


def _unread(x: Tensor) -> Any:
    x.sin()
    torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    return torch.topk(x.cos(), 2)[0]


# Functions of a tensor, its shape, and how many kernels they may take.
FEW_KERNELS: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...], int]] = {
    "permute": (lambda x: (x + 1).permute(1, 0, 2) * 2, (1, 4, 3), 2),
    "transpose": (lambda x: (x + 1).transpose(0, 2) * 2, (1, 1, 3), 2),
    "t": (lambda x: (x + 1).t() * 2, (1, 3), 2),
    "select": (lambda x: (x + 1)[-1] * 2, (4, 3), 2),
    "slice": (lambda x: (x + 1)[-2:] * 2, (4, 3), 2),
    "inner slice": (lambda x: (x + 1)[:, 1:3] * 2, (1, 4, 3), 2),
    "reshape": (lambda x: (x + 1).reshape(3, 4) * 2, (4, 3), 2),
    "clone": (lambda x: (x + 1).clone() * 2, (4, 3), 2),
    "chains": (lambda x: (x.mT.mT.clone() + 1).view(-1).view(3, 2).mT, (2, 3), 2),
    "several views": (_split, (4, 2), 5),
    "unread": (_unread, (4,), 2),
    "constants": (lambda x: x + (torch.arange(4) + 1).sum(), (4,), 1),
    "equal constants": (
        lambda x: x + torch.ones(64, 64).tril().sum() + torch.ones(64, 64).tril().sum(),
        (4,),
        6,
    ),
    "layer norm whose mean is not read": (lambda x: nn.functional.layer_norm(x, (8,)), (4, 8), 3),
    # The layout that torch gives attention's result costs nothing beside the three layers.
    "attention": (lambda x: attend(heads(x), heads(x), heads(x)), (2, 3, 8), 9),
    "attention, joined": (
        lambda x: joined(attend(heads(x), heads(x * 2), heads(x + 1))),
        (2, 3, 8),
        12,
    ),
}


@pytest.mark.parametrize("name", FEW_KERNELS)
def test_what_needs_no_copy_takes_no_kernel(name: str) -> None:
    function, shape, most = FEW_KERNELS[name]
    found = kernels(check(function, (torch.randn(shape),), tolerance=1e-4))
    assert len(found) <= most, found


# What is copied, with how many kernels, in programs whose named dimensions vary.
COPIES: dict[str, tuple[Any, dict[str, int], Any]] = {
    "a view of a size that varies": (lambda x: (x + 1).view(-1) * 2, {}, {0: "rows"}),
    # The runtime finds one size that varies, beside any number of ones, and no two.
    "one size": (lambda x: (x + 1)[None, None] * 2, {}, {0: "rows"}),
    "two sizes": (
        lambda x: (x + 1)[None, None] * 2,
        {"unsqueeze_copy": 2},
        {0: "rows", 1: "columns"},
    ),
    # The input itself is the one result that has to be copied.
    "a buffer": (Of(lambda self, x: self.count(x[0]), count=Counter(0.0)), {}, {}),
}


@pytest.mark.parametrize("name", COPIES)
def test_what_cannot_share_memory_is_copied(name: str) -> None:
    function, expected, names = COPIES[name]
    sizes = {dim: Dim(size, max=8) for dim, size in names.items()}
    calls = [(torch.randn(size, 3),) for size in ((3, 8) if names else (3,))]
    emitted = check(function, *calls, dynamic_shapes=((sizes,),) if names else None)
    found = Counts(kernel.partition(".")[0] for kernel in kernels(emitted))
    copies = {kernel: found[kernel] for kernel in found if "copy" in kernel or kernel == "clone"}
    assert copies == expected
    assert ("executorch_prim::et_view" in found) is (len(names) == 1)


def _causal(x: Tensor) -> Tensor:
    """Return the mask of tokens as transformers' masking utilities make it, positions anew."""
    rows, columns = (torch.arange(x.shape[0]) + 0 for _ in range(2))
    allowed = columns[None][:, None] <= rows[None][:, :, None]
    return torch.ones((), dtype=torch.bool) & allowed


def test_what_depends_on_sizes_alone_is_computed_once() -> None:
    def function(x: Tensor) -> Any:
        return x.where(_causal(x)[0, :, :1], 0.0), _causal(x) & (x[:, 0] > 0)

    calls = [(torch.randn(size, 3),) for size in (3, 8, 1)]
    emitted = check(function, *calls, dynamic_shapes=(({0: Dim("tokens", max=8)},),))
    found = Counts(kernel.partition(".")[0].rpartition("::")[2] for kernel in kernels(emitted))
    assert {name: found[name] for name in ("arange", "add", "le", "bitwise_and")} == {
        "arange": 1,
        "add": 0,
        "le": 1,
        "bitwise_and": 1,
    }
    assert found["et_view"] <= 2


class Ends(Holding, last=lambda: torch.zeros(1, 3)):
    """Keeps a part of what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x + 1
        before = self.get_buffer("last") * 1
        self.get_buffer("last").copy_(rows[3:])
        return rows * 2 + before


def _loop(x: Tensor) -> Any:
    scale, loop = x.sin(), while_loop
    start = (torch.zeros((), dtype=torch.int64), x)
    return loop(lambda i, _: i < 3, lambda i, t: (i + 1, t * scale), start)[1]  # type: ignore[no-untyped-call]


def _scan(x: Tensor) -> Any:
    def step(carry: Tensor, row: Tensor) -> Any:
        product = torch.outer(row, row)
        product = torch.mm(torch.mm(product, product), product)
        return carry + product.sum(), product * 0.5

    return scan(step, torch.zeros(()), x)


def _checked(x: Tensor) -> Tensor:
    require: Any = torch._check
    n: Any = (x.sum() * 0 + 3).to(torch.int64).item()
    require(n >= 0)
    require(n <= 8)
    made: Tensor = torch.zeros(n) + n
    return made


HAZARDS: dict[str, Any] = {
    "an input that is read later": lambda x: torch.relu(y := x + 1) * y,
    "a loop that reads a value again": _loop,
    "a loop that fills a value turn by turn": _scan,
    "a part of a value that a buffer keeps": Ends(),
    "an assertion": _checked,
}


@pytest.mark.parametrize("name", HAZARDS)
def test_memory_that_is_needed_is_kept(name: str) -> None:
    calls = [(torch.randn(4, 3),) for _ in range(3)]
    found = kernels(check(HAZARDS[name], *calls, tolerance=1e-4))
    # Assertions and what only they read are dropped.
    assert name != "an assertion" or not {"ge", "le"} & {
        one.partition(".")[0].rpartition("::")[2] for one in found
    }


def test_channels_last_spreads_and_ends_where_kernels_demand_contiguous() -> None:
    model = Of(lambda self, x: self.conv(x).relu().mean((2, 3)), conv=nn.Conv2d(3, 4, 3))
    image = torch.randn(1, 3, 8, 8).to(memory_format=torch.channels_last)
    emitted = check(model, (image,))
    assert sum("_clone_dim_order" in kernel for kernel in kernels(emitted)) == 1
    values: list[Any] = [value.val for value in emitted.program.execution_plan[0].values]
    orders = [value.dim_order for value in values if getattr(value, "sizes", [])[1:2] == [4]]
    assert [0, 2, 3, 1] in orders


def _overloads() -> list[Any]:
    """Return every overload of ATen and of the reference operators."""
    names = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    found = []
    for space, _, name in names:
        if space in ("aten", "prims"):
            short, _, overload = name.partition(".")
            packet = getattr(getattr(torch.ops, space), short, None)
            found.append(getattr(packet, overload or "default", None))
    return [target for target in found if target is not None]


def test_only_deterministic_operators_are_computed_at_emit_time() -> None:
    random = [op for op in _overloads() if torch.Tag.nondeterministic_seeded in op.tags]
    assert len(random) > 140
    assert not any(is_repeatable(target) for target in random)
    for target in _overloads():
        name = str(target)
        if target._schema.is_mutable or "empty" in name or name == "aten.from_file.default":
            assert not is_repeatable(target), name
    core = [op for op in _overloads() if torch.Tag.core in op.tags]
    left = {str(op) for op in core if not is_repeatable(op)}
    uninitialised = {name for name in left if "empty" in name or "resize" in name}
    mutable = {str(op) for op in core if op._schema.is_mutable}
    assert left == {*map(str, random)} & {*map(str, core)} | uninitialised | mutable
    assert len(left) < 20 < len(core)


def test_an_operator_of_others_is_neither_computed_nor_merged() -> None:
    config = EmitConfig(custom_kernels=frozenset({"emitter_fold::f.out"}))
    with torch.library._scoped_library("emitter_fold", "FRAGMENT") as library:
        library.define("f(Tensor x) -> Tensor")
        library.define("f.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
        library.impl("f", lambda x: x + 1, "CompositeExplicitAutograd")
        call = torch.ops.emitter_fold.f
        model = Of(lambda x: x + call(torch.ones(4)) + call(torch.ones(4)))
        found = kernels(emit(exported(model, torch.ones(4)), config=config))
    assert found.count("emitter_fold::f.out") == 2


def test_every_kernel_that_the_emitter_names_is_in_the_table() -> None:
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(lowerdeck.emitter.__path__, "lowerdeck.emitter.")
    ]
    values = [value for module in modules for value in vars(module).values()]
    named = {value.full_name for value in values if isinstance(value, Kernel)}
    assert len(named) > 5
    named |= {kernel.full_name for kernel in SCALAR_KERNELS.values()}
    assert named <= set(runtime_kernels()) == OFFICIAL_KERNELS.names
