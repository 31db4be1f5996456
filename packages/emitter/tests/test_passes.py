"""Each pass keeps what it promises, from what it requires."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter as Counts
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emitter_running import check, kernels  # type: ignore[import-not-found]
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim

import lowerdeck.emitter
from lowerdeck.emitter import OFFICIAL_KERNELS, EmitConfig
from lowerdeck.emitter.backend.linearizing import linearize
from lowerdeck.emitter.decompositions.table import decompose
from lowerdeck.emitter.frontend.read_graph import read_method
from lowerdeck.emitter.ir.assertions import is_assertion
from lowerdeck.emitter.ir.graph import Call, Kernel, Method, all_blocks, values_in
from lowerdeck.emitter.ir.runtime_ops import SCALAR_KERNELS
from lowerdeck.emitter.ir.values import TensorValue, channels_last_order
from lowerdeck.emitter.memory.lifetimes import spans
from lowerdeck.emitter.passes.drop_assertions import drop_assertions
from lowerdeck.emitter.passes.drop_dead_code import drop_dead_code
from lowerdeck.emitter.passes.fold_constants import fold_constants, is_repeatable
from lowerdeck.emitter.passes.legalize_layouts import legalize_layouts
from lowerdeck.emitter.passes.legalize_operands import legalize_operands
from lowerdeck.emitter.passes.legalize_scalars import legalize_scalars
from lowerdeck.emitter.passes.pipeline import run_passes
from lowerdeck.emitter.passes.remove_copies import remove_copies
from lowerdeck.emitter.passes.select_kernels import needs_no_kernel
from lowerdeck.emitter.passes.share_views import share_views
from lowerdeck.emitter.passes.writing_in_place import write_in_place
from lowerdeck.serializer import runtime_kernels
from lowerdeck_zoo import Of, exported
from lowerdeck_zoo.models.state import Counter


def method_of(function: Callable[..., Any] | nn.Module, *args: Any, **options: Any) -> Method:
    """Return the functional form of a function or module, decomposed."""
    module = function if isinstance(function, nn.Module) else Of(function)
    program = exported(module, *args, **options)
    return read_method("forward", decompose(program, EmitConfig()))


def calls(method: Method) -> list[Call]:
    found = [op for block in all_blocks(method.block) for op in block.body]
    return [op for op in found if isinstance(op, Call)]


def names(method: Method) -> list[str]:
    return [call.op_name for call in calls(method)]


def checked(x: Any) -> Any:
    check: Any = torch._check
    n = x.sum().to(torch.int64).item()
    check(n >= 0)
    check(n <= 8)
    return torch.zeros(n)


def test_assertions_and_what_only_they_read_go() -> None:
    method = method_of(checked, torch.ones(4))
    assert any(is_assertion(call.target) for call in calls(method))
    drop_assertions(method)
    drop_dead_code(method)
    assert not any(is_assertion(call.target) for call in calls(method))
    assert not {"ge", "le"} & set(names(method))


def test_every_call_that_is_left_is_read() -> None:
    def function(x: Any) -> Any:
        x.sin()
        torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return torch.topk(x.cos(), 2)[0]

    method = method_of(function, torch.ones(4))
    drop_dead_code(method)
    assert names(method) == ["cos", "topk"]
    live = set(values_in(method.outputs)) | {
        value for call in calls(method) for value in values_in(call.args)
    }
    assert all(any(out in live for out in call.outs) for call in calls(method))


def test_calls_of_constants_are_computed_once_or_at_emit_time() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        small = torch.arange(4) + 1
        wide = torch.ones(64, 64).tril()
        other = torch.ones(64, 64).tril()
        return x + small.sum() + wide.sum() + other.sum()

    method = method_of(function, torch.ones(4))
    fold_constants(method)
    drop_dead_code(method)
    assert "arange" not in names(method)
    assert names(method).count("tril") == 1


def overloads() -> list[Any]:
    """Return every overload of ATen and of the reference operators."""
    names = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    found = []
    for space, _, name in names:
        if space in ("aten", "prims"):
            short, _, overload = name.partition(".")
            packet = getattr(getattr(torch.ops, space), short, None)
            found.append(getattr(packet, overload or "default", None))
    return [target for target in found if target is not None]


def test_what_torch_calls_random_is_never_computed_at_emit_time() -> None:
    random = [op for op in overloads() if torch.Tag.nondeterministic_seeded in op.tags]
    assert len(random) > 140
    assert not any(is_repeatable(target) for target in random)


def test_what_writes_or_gives_memory_as_it_lies_is_never_computed_at_emit_time() -> None:
    for target in overloads():
        name = str(target)
        if target._schema.is_mutable or "empty" in name or name == "aten.from_file.default":
            assert not is_repeatable(target), name


def test_deterministic_operators_of_the_core_are_computed_at_emit_time() -> None:
    core = [op for op in overloads() if torch.Tag.core in op.tags]
    left = {str(op) for op in core if not is_repeatable(op)}
    random = {str(op) for op in core if torch.Tag.nondeterministic_seeded in op.tags}
    uninitialised = {name for name in left if "empty" in name or "resize" in name}
    mutable = {str(op) for op in core if op._schema.is_mutable}
    assert left == random | uninitialised | mutable
    assert len(left) < 20 < len(core)


@pytest.mark.parametrize("name", ["repeat", "shout"])
def test_an_operator_of_others_is_neither_computed_nor_merged(name: str) -> None:
    with torch.library._scoped_library("emitter_fold", "FRAGMENT") as library:
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: x + 1, "CompositeExplicitAutograd")
        target = getattr(torch.ops.emitter_fold, name).default

        def function(x: torch.Tensor) -> Any:
            small = torch.ones(4)
            return x + target(small) + target(small)

        method = method_of(function, torch.ones(4))
        fold_constants(method)
        assert names(method).count(name) == 2


def test_an_effect_is_kept_although_nobody_reads_its_result() -> None:
    method = method_of(lambda x: torch.relu(x).sin(), torch.ones(4))
    first, second = calls(method)
    method.outputs = [first.outs[0]]
    second.effect = True
    drop_dead_code(method)
    assert names(method) == ["relu", "sin"]
    second.effect = False
    drop_dead_code(method)
    assert names(method) == ["relu"]


def test_a_number_calls_the_scalar_overload_or_becomes_a_constant() -> None:
    method = method_of(lambda x: torch.maximum(x + 2, torch.tensor(1.0)) > 1, torch.ones(4))
    legalize_scalars(method, OFFICIAL_KERNELS)
    for call in calls(method):
        for argument, given in zip(call.target._schema.arguments, call.args, strict=True):
            assert str(argument.type) != "Tensor" or isinstance(given, TensorValue)
    assert str(calls(method)[0].target) == "aten.add.Scalar"


def test_operands_that_kernels_refuse_are_rewritten() -> None:
    def function(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> Any:
        return torch.index_select(x, 0, i), i + 0.5, v.sum(0), v.cumsum(0)

    method = method_of(
        function, torch.ones(4), torch.ones(2, dtype=torch.int32), torch.tensor(2.0)
    )
    legalize_scalars(method, OFFICIAL_KERNELS)
    before = names(method)
    assert {"sum", "cumsum"} <= set(before)
    legalize_operands(method)
    assert not {"sum", "cumsum"} & set(names(method))
    once = names(method)
    legalize_operands(method)
    assert names(method) == once


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x)).mean((2, 3))


def test_channels_last_spreads_and_ends_where_kernels_demand_contiguous() -> None:
    image = torch.ones(1, 3, 8, 8).to(memory_format=torch.channels_last)
    method = method_of(Image(), image)
    legalize_layouts(method, OFFICIAL_KERNELS)
    kernels = runtime_kernels().values()
    demanding = {kernel.operator for kernel in kernels if "contiguous" in kernel.words}
    for call in calls(method):
        tensors = [v for v in (*values_in(call.args), *call.outs) if isinstance(v, TensorValue)]
        orders = {v.dim_order for v in tensors if v.rank == 4}
        converts = call.op_name == "_clone_dim_order"
        assert converts or len(orders) <= 1, call.op_name
        if call.op_name in demanding:
            assert all(value.contiguous for value in tensors)
    (conv,) = [call for call in calls(method) if call.op_name == "convolution"]
    assert conv.outs[0].dim_order == channels_last_order(4)  # type: ignore[union-attr]
    assert names(method).count("_clone_dim_order") == 1


def test_copies_and_chains_of_views_go() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.permute(1, 0).permute(1, 0).clone() + 1
        return y.view(-1).view(3, 2).permute(1, 0)

    method = method_of(function, torch.ones(2, 3))
    legalize_layouts(method, OFFICIAL_KERNELS)
    remove_copies(method)
    drop_dead_code(method)
    assert names(method) == ["add", "view", "permute"]


def test_a_view_shares_memory_and_needs_no_kernel() -> None:
    def function(x: Any) -> Any:
        y = x + 1
        first, second = y.split([1, 3])
        return first.unsqueeze(0) * 2, second.view(-1) * 2, y[2] * 2, y[1:3] * 2

    method = method_of(function, torch.ones(4, 2))
    legalize_layouts(method, OFFICIAL_KERNELS)
    remove_copies(method)
    share_views(method)
    shared = [call for call in calls(method) if needs_no_kernel(call)]
    assert len(shared) == 5
    offsets = {out.base_offset for call in shared for out in call.outs}  # type: ignore[union-attr]
    assert offsets == {0, 8, 16}


def test_a_copy_that_nothing_writes_shares_memory() -> None:
    method = method_of(lambda x: (x + 1).clone() * 2, torch.ones(2, 3))
    share_views(method)
    (copy,) = (call for call in calls(method) if "clone" in call.op_name)
    assert needs_no_kernel(copy)


# What is made without a copy, and with how many kernels that copy.
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
    "branches": (
        lambda x: torch.cond(
            x.sum() > 0, lambda t: (t + 1, t.clone()), lambda t: (t - 1, t * 2), (x,)
        ),
        {"clone": 1},
        {},
    ),
    "a buffer": (Of(lambda self, x: self.count(x[0]), count=Counter(0.0)), {}, {}),
}


@pytest.mark.parametrize("name", COPIES)
def test_what_is_copied(name: str) -> None:
    function, expected, names = COPIES[name]
    sizes = {dim: Dim(size, max=8) for dim, size in names.items()}
    calls = [(torch.randn(3, 3),), *([(torch.randn(8, 3),)] if 1 not in names and names else [])]
    shapes = None if not names else ((sizes,),)
    found = Counts(
        one.partition(".")[0] for one in kernels(check(function, *calls, dynamic_shapes=shapes))
    )
    assert {
        one: count for one, count in found.items() if "copy" in one or one == "clone"
    } == expected
    assert ("executorch_prim::et_view" in found) is (len(names) == 1)


class Ends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x + 1
        self.last.copy_(rows[1:])  # type: ignore[operator]
        return rows * 2


def test_a_part_of_what_was_computed_is_copied_to_a_buffer() -> None:
    method = method_of(Ends(), torch.ones(2, 3))
    run_passes(method, EmitConfig())
    code = linearize(method)
    before = [step for step in code.steps if any(value.state for value in step.writes)]
    write_in_place(code, OFFICIAL_KERNELS)
    assert [step for step in code.steps if any(value.state for value in step.writes)] == before
    (written,) = before
    assert written.reads[0].storage is not written.writes[0].storage


def test_an_input_that_is_read_later_keeps_its_memory() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        z = torch.relu(y)
        return z * y

    method = method_of(function, torch.ones(4))
    run_passes(method, EmitConfig())
    code = linearize(method)
    write_in_place(code, OFFICIAL_KERNELS)
    relu = next(step for step in code.steps if step.writes[0].name == "relu")
    assert relu.reads[0].storage is not relu.writes[0].storage


def test_what_a_loop_reads_again_lives_to_its_end() -> None:
    def function(x: torch.Tensor) -> Any:
        scale = x.sin()
        start = (torch.zeros((), dtype=torch.int64), x)
        loop: Any = while_loop
        _, y = loop(lambda i, _: i < 3, lambda i, t: (i + 1, t * scale), start)
        return y

    method = method_of(function, torch.ones(4))
    run_passes(method, EmitConfig())
    code = linearize(method)
    (loop,) = code.loops
    first, last = spans(code)
    sine = next(step for step in code.steps if step.writes and step.writes[0].name == "sin")
    key = sine.writes[0].storage
    assert first[key] < loop.first
    assert last[key] == loop.last


def test_what_a_loop_fills_turn_by_turn_is_there_from_its_first() -> None:
    def step(carry: torch.Tensor, row: torch.Tensor) -> Any:
        product = torch.mm(row, row.t())
        product = torch.mm(torch.mm(product, product), product)
        return carry + product.sum(), product * 0.5

    def function(x: torch.Tensor) -> Any:
        return scan(step, torch.zeros(()), x)

    method = method_of(function, torch.randn(5, 4, 3))
    run_passes(method, EmitConfig())
    code = linearize(method)
    (loop,) = code.loops
    first, last = spans(code)
    written = {
        value.storage for step in code.steps[loop.first : loop.last + 1] for value in step.writes
    }
    filled = [key for key in written if last[key] > loop.last]
    assert len(filled) == 2
    assert all(first[key] <= loop.first for key in filled)


def test_every_kernel_that_the_emitter_names_is_in_the_table() -> None:
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(lowerdeck.emitter.__path__, "lowerdeck.emitter.")
    ]
    named = {
        value.full_name
        for module in modules
        for value in vars(module).values()
        if isinstance(value, Kernel)
    }
    assert len(named) > 5
    assert named | {kernel.full_name for kernel in SCALAR_KERNELS.values()} <= set(
        runtime_kernels()
    )
    assert OFFICIAL_KERNELS.names == set(runtime_kernels())
