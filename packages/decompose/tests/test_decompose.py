"""``decompose`` gives what torch's own way gives, and traces each distinct call once."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from program_likeness import differences  # type: ignore[import-not-found]
from torch import nn
from torch._higher_order_ops import while_loop
from torch.fx import Graph, Node
from torch.fx import traceback as fx_traceback
from torch.utils import _pytree as pytree

from lowerdeck.decompose import (
    DecomposeError,
    DecompositionCache,
    Rules,
    can_keep,
    decompose,
    explain,
    take_apart,
)

ATEN = torch.ops.aten

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning"),
]


class Blocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.reshape(-1)


class Writing(nn.Module):
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("cache", torch.zeros(2, 8))

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> Any:
        y = x * 2
        row = y[0]
        row.mul_(3)
        self.cache[1] = row
        first, second = torch.split(y, 4, 1)
        first.add_(second)
        given.t().fill_(1.5)
        for one in y.unbind(0):
            one.clamp_(max=2)
        return self.norm(y), row, self.cache.sum(0), torch.where(y > 0, y, 0.0), given


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        def grown(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(x)
            return y + 1

        y = torch.cond(x.sum() > 0, grown, nn.functional.gelu, (x,))
        count, z = while_loop(  # type: ignore[no-untyped-call]
            lambda i, x: i < 3, lambda i, x: (i + 1, torch.softmax(x, -1)), (torch.tensor(0), x)
        )
        with torch.no_grad():
            still = self.linear(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = self.linear(x)
        where = torch.nonzero(x[0] > 0)
        return y, count, z, still, half, where * 2, x[x > 0.5]


class Odd(nn.Module):
    """Calls whose parts depend on more than shapes."""

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.stft(x, 16, window=torch.hann_window(16), return_complex=True).abs()
        z = torch.einsum("bft,bgt->bfg", y, y)
        return (
            *(z.to(torch.float64), z.to(torch.float32), torch.dropout(z, 0.5, True)),
            *torch.chunk(z, 3, 1),
            torch.as_strided(x[1], (2, 3), (1, 2)),
            nn.functional.interpolate(z[None], scale_factor=2.0, mode="bilinear"),
            torch.tensor([1.0, 2.0]) + x[0, :2],
        )


def _programs() -> dict[str, tuple[nn.Module, tuple[Any, ...], Any]]:
    n = torch.export.Dim("n", min=2, max=64)
    x = torch.randn(2, 8)
    return {
        "blocks": (Blocks(4), (x,), None),
        "blocks of any number of rows": (Blocks(2), (x,), ({0: n},)),
        "writing": (Writing(), (x, torch.randn(2, 3)), None),
        "branching": (Branching(), (x,), None),
        "branching on any number of rows": (Branching(), (x,), ({0: n},)),
        "odd": (Odd(), (torch.randn(2, 64),), None),
        "recurrent": (nn.LSTM(8, 4, batch_first=True).eval(), (torch.randn(2, 3, 8),), None),
        "attending": (nn.TransformerEncoderLayer(8, 2, 16).eval(), (torch.randn(3, 2, 8),), None),
    }


@pytest.mark.parametrize(
    ("name", "table"),
    [
        *((name, "core") for name in _programs()),
        *((name, "nothing") for name in ("writing", "odd", "recurrent")),
        ("odd", "default"),
    ],
)
def test_programs_come_out_as_torch_gives_them(name: str, table: str) -> None:
    torch.manual_seed(0)
    module, args, dynamic = _programs()[name]
    program = torch.export.export(module, args, dynamic_shapes=dynamic)
    given: Any = {"core": None, "nothing": {}, "default": torch.export.default_decompositions()}
    assert explain(program, given[table]).reason is None
    found = decompose(program, given[table])
    assert not differences(found, program.run_decompositions(given[table]))


def test_the_numbers_are_those_of_eager() -> None:
    torch.manual_seed(0)
    module, args, _ = _programs()["writing"]
    program = torch.export.export(module, args)
    found = decompose(program).module()
    expected = module(*(arg.clone() for arg in args))
    for one, other in zip(found(*(arg.clone() for arg in args)), expected, strict=True):
        torch.testing.assert_close(one, other)
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(found.get_buffer(name), buffer)


@pytest.mark.parametrize("count", [4, 40])
def test_each_distinct_call_is_traced_once(count: int) -> None:
    program = torch.export.export(Blocks(count), (torch.randn(2, 8),))
    told = explain(program)
    # linear, layer_norm and reshape; gelu and add come out as they went in
    assert told.traces == 3
    assert told.copies == 4 * count + 1 - 5


def test_a_second_program_of_a_family_needs_no_trace() -> None:
    cache = DecompositionCache()
    first = torch.export.export(Blocks(2), (torch.randn(2, 8),))
    second = torch.export.export(Blocks(5), (torch.randn(2, 8),))
    assert explain(first, cache=cache).traces == 3
    assert explain(second, cache=cache).traces == 0
    assert not differences(decompose(second, cache=cache), second.run_decompositions())
    assert explain(second, {}, cache=cache).traces == 1, "another table, other templates"


def test_a_cache_is_bounded() -> None:
    cache = DecompositionCache(3)
    decompose(torch.export.export(Blocks(1), (torch.randn(2, 8),)), cache=cache)
    assert len(cache) == 3
    with pytest.raises(DecomposeError, match="at least 1"):
        DecompositionCache(0)


def test_kept_operators_stay_whole() -> None:
    aten = torch.ops.aten
    program = torch.export.export(Blocks(3), (torch.randn(2, 8),))
    found = decompose(program, keep=[aten.linear.default, aten.gelu.default])
    targets = [node.target for node in found.graph.nodes]
    assert targets.count(aten.linear.default) == targets.count(aten.gelu.default) == 3
    assert aten.addmm.default not in targets
    table: Any = torch.export.default_decompositions()
    del table[aten.linear.default]
    table.pop(aten.gelu.default, None)
    assert not differences(found, program.run_decompositions(table))


def test_some_calls_of_an_operator_stay_whole_and_others_do_not() -> None:
    program = torch.export.export(Blocks(3), (torch.randn(2, 8),))
    before = str(program)
    asked = []

    def second(call: Node) -> bool:
        asked.append(call.target)
        return "linear_1" in call.name

    cache = DecompositionCache()
    keep = {ATEN.linear.default: second, ATEN.gelu.default: None}
    found = decompose(program, keep=keep, cache=cache)
    targets = [node.target for node in found.graph.nodes]
    assert targets.count(ATEN.linear.default) == 1
    assert targets.count(ATEN.addmm.default) == 2
    assert targets.count(ATEN.gelu.default) == 3
    assert asked == [ATEN.linear.default] * 3
    assert str(program) == before
    given = torch.randn(2, 8)
    assert torch.equal(found.module()(given), program.module()(given))
    # What is kept by call makes no template: those of others serve all.
    size = len(cache)
    decompose(program, keep={ATEN.linear.default: lambda call: False, **keep}, cache=cache)
    assert len(cache) == size


def test_calls_cannot_be_chosen_of_what_shares_memory_or_by_what_is_no_function() -> None:
    program = torch.export.export(Blocks(1), (torch.randn(2, 8),))
    with pytest.raises(DecomposeError, match=r"some calls of aten\.t\.default cannot be kept"):
        decompose(program, keep={ATEN.t.default: lambda call: True})
    with pytest.raises(DecomposeError, match="expected a function from a node"):
        decompose(program, keep={ATEN.linear.default: True})
    assert can_keep(ATEN.linear.default, some=True)
    assert not can_keep(ATEN.transpose.int, some=True)


@pytest.mark.parametrize(
    "seen",
    [
        lambda x: x.as_strided((2, 3), (6, 2), 1),
        lambda x: x.view(-1) * 2,
        lambda x: x.flatten().add_(1),
        lambda x: x.t().reshape(-1),
        lambda x: x.view(torch.int32),
        lambda x: x.view(3, 2, 2).select(1, 1).as_strided((2, 2), (1, 3)),
    ],
    ids=range(6),
)
def test_what_is_copied_to_lies_as_it_lay(seen: Any) -> None:
    """torch lets the copy go, and then views see what was copied, in its own order."""

    class Copies(nn.Module):
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(4, 3))

        def forward(self, x: torch.Tensor) -> Any:
            return seen(self.table.copy_(x.t())), self.table * 1, x + 1

    given = torch.arange(12.0).reshape(3, 4)
    program = torch.export.export(Copies(), (given,))
    eager = Copies()
    wanted = eager(given)
    found = decompose(program).module()
    got = found(given)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(dict(found.named_buffers())["table"], eager.table)


def test_what_may_return_its_argument_cannot_be_kept() -> None:
    program = torch.export.export(Blocks(1), (torch.randn(2, 8),))
    with pytest.raises(DecomposeError, match=r"aten\.reshape\.default cannot be kept"):
        decompose(program, keep=[torch.ops.aten.reshape.default])
    with pytest.raises(DecomposeError, match="no overload"):
        decompose(program, keep=[torch.ops.aten.linear])  # type: ignore[list-item]
    asked = [ATEN.reshape.default, ATEN.linear, ATEN.linear.default, ATEN.relu.default]
    assert list(map(can_keep, asked)) == [False, False, True, True]


def test_rules_of_the_user_are_used() -> None:
    def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)

    program = torch.export.export(Blocks(2), (torch.randn(2, 8),))
    table = {**torch.export.default_decompositions().materialize()}
    table[torch.ops.aten.gelu.default] = gelu
    found = decompose(program, table)
    assert not differences(found, program.run_decompositions(table))
    assert torch.ops.aten.sigmoid.default in [node.target for node in found.graph.nodes]


def test_nodes_know_where_they_come_from() -> None:
    program = torch.export.export(Blocks(2), (torch.randn(2, 8),))
    handle = {"owner": 7}
    linear = next(node for node in program.graph.nodes if node.name == "linear_1")
    linear.meta["custom"] = handle
    found = decompose(program)
    made = [n for n in found.graph.nodes if n.meta.get("custom") == handle]
    assert [node.target for node in made] == [
        torch.ops.aten.permute.default,
        torch.ops.aten.addmm.default,
    ]
    expected = {node.name: node for node in program.run_decompositions().graph.nodes}
    for node in found.graph.nodes:
        other = expected[node.name]
        for field in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn"):
            if node.op == "call_function":
                assert node.meta.get(field) == other.meta.get(field)
        if node in made:
            assert node.meta["from_node"][-1].name == "linear_1"
            assert str(node.meta["original_aten"]) == str(other.meta["original_aten"])


def test_values_of_copies_have_memory_of_their_own() -> None:
    found = decompose(torch.export.export(Blocks(2), (torch.randn(2, 8),)))
    storages: dict[int, list[str]] = {}
    for node in found.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default):
        storages.setdefault(node.meta["val"].untyped_storage()._cdata, []).append(node.name)
    assert all(len(names) == 1 for names in storages.values())
    for node in found.graph.find_nodes(op="call_function", target=torch.ops.aten.permute.default):
        own, parent = node.meta["val"], node.args[0].meta["val"]
        assert own.untyped_storage()._cdata == parent.untyped_storage()._cdata


def test_the_program_that_is_given_stays_as_it_was() -> None:
    module, args, _ = _programs()["writing"]
    program = torch.export.export(module, args)
    before = str(program)
    decompose(program)
    assert str(program) == before


def test_a_deep_copy_stays_as_it_was() -> None:
    class Builtin(nn.Module):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            return input.add_(1)

    program = copy.deepcopy(torch.export.export(Builtin(), (torch.ones(2),)))
    names = [node.name for node in program.graph.nodes]
    found = decompose(program)
    assert explain(program).reason is None
    assert [node.name for node in program.graph.nodes] == names
    assert [spec.target for spec in found.graph_signature.output_specs] == ["input", None]


class Copying(nn.Module):
    """Copies to buffers, some of which torch's own way loses or fails on."""

    cache: torch.Tensor
    wide: torch.Tensor
    halved: torch.Tensor
    again: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 8))
        self.register_buffer("wide", torch.zeros(2, 8))
        self.register_buffer("halved", torch.zeros(2, 8, dtype=torch.float16))
        self.register_buffer("again", torch.zeros(2, 8))

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> Any:
        self.cache.copy_(x * 2)
        self.wide.fill_(x.sum())
        self.halved.copy_(x)
        self.again.copy_(self.cache)
        given.copy_(x[0])
        idle = nn.functional.dropout(x, training=False)
        # Eager's dropout returns its argument.
        idle.add_(1)
        return self.cache, self.wide[0], x * 3


def test_what_is_copied_to_keeps_its_shape_and_dtype() -> None:
    x, given = torch.randn(2, 8), torch.randn(2, 8)
    program = torch.export.export(Copying(), (x, given))
    found = decompose(program)
    nodes = found.graph.output_node().args[0]
    for spec, node in zip(found.graph_signature.output_specs, nodes, strict=True):
        if spec.target in found.state_dict:
            held = found.state_dict[spec.target]
            assert (held.shape, held.dtype) == (node.meta["val"].shape, node.meta["val"].dtype)
    module, eager = found.module(), Copying()
    for _ in range(2):
        ours, theirs = ([value.clone() for value in (x, given)] for _ in range(2))
        for one, other in zip(module(*ours), eager(*theirs), strict=True):
            torch.testing.assert_close(one, other)
        torch.testing.assert_close(ours, theirs)
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(module.get_buffer(name), buffer)


class Swapping(nn.Module):
    """Buffers that get what others were before those are written."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("one", "two", "turned"):
            self.register_buffer(name, torch.randn(3, 3))

    def forward(self, x: torch.Tensor) -> Any:
        one, two, turned = map(self.get_buffer, ("one", "two", "turned"))
        old = one.clone()
        one.copy_(two)
        turned.copy_(two.t())
        two.copy_(old)
        two.add_(x)
        return turned, torch.where(x > 0, x, turned)


def test_no_buffer_gets_what_another_is_only_after_it_was_written() -> None:
    # torch returns the placeholder of one buffer as the new value of another, and writes the
    # first before it reads the second.
    module, x = Swapping(), torch.randn(3, 3)
    found = decompose(torch.export.export(copy.deepcopy(module), (x,))).module()
    for _ in range(2):
        for one, other in zip(found(x), module(x), strict=True):
            torch.testing.assert_close(one, other)
        for name, held in module.named_buffers():
            torch.testing.assert_close(found.get_buffer(name), held)


def test_what_cannot_be_told_call_by_call_goes_torchs_way() -> None:
    class Reshaping(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            y.unsqueeze_(0)
            return y.relu()

    program = torch.export.export(Reshaping(), (torch.randn(2, 8),))
    told = explain(program)
    assert told.reason is not None
    assert "changes in place how its argument shows memory" in str(told)
    assert not differences(decompose(program), program.run_decompositions())
    found = decompose(program, keep=[torch.ops.aten.relu.default])
    assert torch.ops.aten.relu.default in [node.target for node in found.graph.nodes]


@torch.library.custom_op("lowerdeck_decompose_tests::added", mutates_args=("out", "more"))
def added(
    x: torch.Tensor, out: torch.Tensor, more: list[torch.Tensor], last: torch.Tensor | None = None
) -> torch.Tensor:
    out.add_(x)
    for each in more:
        each.mul_(2)
    return x * 2 if last is None else x + last


@added.register_fake
def _(x: Any, out: Any, more: Any, last: Any = None) -> torch.Tensor:
    return torch.empty_like(x)


class Added(nn.Module):
    """Calls a custom operator on a buffer, an input and values, one twice, one alike."""

    sums: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(3, 4))

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> Any:
        own: Any = torch.ops.lowerdeck_decompose_tests.added
        y = x.sin()
        first = own(x, self.sums, [given, y])
        y[0] += 1
        second = own(x, y, [], self.sums)
        third = own(self.sums[:1], x[:1].clone(), [y.t().contiguous()])
        return first, second, third, y, self.sums[1], given.sum()


@pytest.mark.parametrize("dynamic", [False, True])
def test_custom_operators_that_write_are_told_call_by_call(dynamic: bool) -> None:
    inputs = (torch.randn(3, 4), torch.randn(2, 4))
    rows = torch.export.Dim("rows", min=2, max=9)
    shapes = (None, {0: rows}) if dynamic else None
    program = torch.export.export(Added(), inputs, dynamic_shapes=shapes)
    assert explain(program).reason is None
    found = decompose(program)
    assert not differences(found, program.run_decompositions())
    ours, eager = found.module(), Added()
    given = [[each.clone() for each in inputs] for _ in range(2)]
    for one, other in zip(ours(*given[0]), eager(*given[1]), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(given[0], given[1])
    torch.testing.assert_close(ours.get_buffer("sums"), eager.sums)


@pytest.mark.parametrize("dynamic", [False, True])
def test_custom_operators_that_were_told_by_values_are_taken_as_they_are(dynamic: bool) -> None:
    # As a compiler takes a program apart that was taken apart before.
    inputs = (torch.randn(3, 4), torch.randn(2, 4))
    rows = torch.export.Dim("rows", min=2, max=9)
    shapes = (None, {0: rows}) if dynamic else None
    program = torch.export.export(Added(), inputs, dynamic_shapes=shapes)
    sine = torch.ops.aten.sin.default
    once = decompose(program, keep=[sine])
    table: dict[Any, Any] = {sine: lambda x: torch.cos(x - torch.pi / 2)}
    assert explain(once, table).reason is None
    found = decompose(once, table)
    targets = [node.target for node in found.graph.nodes]
    assert sine not in targets
    assert torch.ops.higher_order.auto_functionalized_v2 in targets
    ours, eager = found.module(), Added()
    given = [[each.clone() for each in inputs] for _ in range(2)]
    for one, other in zip(ours(*given[0]), eager(*given[1]), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(given[0], given[1])
    assert torch.equal(dict(ours.named_buffers())["sums"], eager.sums)


@pytest.mark.parametrize("part", [lambda x: x[1:], lambda x: x.t()], ids=["rows", "transposed"])
def test_custom_operators_that_write_views_go_torchs_way(part: Any) -> None:
    """torch tells them by the whole of the memory, and where in it the view is."""

    class Partly(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            y = x * 2
            own: Any = torch.ops.lowerdeck_decompose_tests.added
            return own(part(x), part(y), []), y

    program = torch.export.export(Partly(), (torch.randn(3, 4),))
    assert "writes a view" in str(explain(program))
    assert not differences(decompose(program), program.run_decompositions())


def test_what_no_program_of_values_can_tell_is_refused() -> None:
    class Overlapping(nn.Module):
        one: torch.Tensor
        other: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            whole = torch.zeros(6)
            self.register_buffer("one", whole[:4])
            self.register_buffer("other", whole[2:])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.one.add_(x)
            return self.other + 1

    program = torch.export.export(Overlapping(), (torch.ones(4),))
    with pytest.raises(DecomposeError, match="overlap in memory"):
        decompose(program)


def _targets(graph: Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_rules_may_keep_one_call_and_take_the_next_apart() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.silu(x) + nn.functional.silu(x.double()).float()

    def narrow(x: torch.Tensor) -> Any:
        return x * torch.sigmoid(x) if x.dtype is torch.float32 else NotImplemented

    program = torch.export.export(Twice(), (torch.ones(2, 3),))
    parts = take_apart(program, Rules({ATEN.silu.default: narrow}, {}))
    found = _targets(parts.graph_module.graph)
    assert found.count(ATEN.sigmoid.default) == found.count(ATEN.silu.default) == 1


def test_rules_that_look_at_the_result_are_asked_for_each_result() -> None:
    asked: list[tuple[int, ...]] = []

    def rule(x: torch.Tensor) -> Any:
        held = fx_traceback.get_current_meta().get("val", x)
        asked.append(held.stride())
        return NotImplemented

    program = torch.export.export(Blocks(3), (torch.ones(2, 8),))
    gelus = program.graph.find_nodes(op="call_function", target=ATEN.gelu.default)
    held = gelus[1].meta["val"]
    # As where an operator before it was taken apart into another layout.
    gelus[1].meta["val"] = held.t().contiguous().t()
    take_apart(program, Rules({ATEN.gelu.default: rule}, {}, by_result=True))
    assert asked == [(8, 1), (1, 2)]
    asked.clear()
    take_apart(program, Rules({ATEN.gelu.default: rule}, {}))
    assert len(asked) == 1


def test_a_program_that_cannot_be_told_call_by_call_has_parts_all_the_same() -> None:
    class Narrowing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).squeeze_(0) + 1

    program = torch.export.export(Narrowing(), (torch.ones(1, 3),))
    assert explain(program).reason is not None
    parts = take_apart(program, Rules({}, {}))
    assert ATEN.add.Tensor in _targets(parts.graph_module.graph)
    assert not any("squeeze_" in str(target) for target in _targets(parts.graph_module.graph))


class Plain(nn.Module):
    """Calls that trace to themselves, each in several layouts, and what is written in between."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> Any:
        y = torch.sin(x.t()) + w
        y.mul_(2)
        z = torch.cat([y, y.t().contiguous().t()], 1)
        rows = z[1:, ::2].unsqueeze(0)
        rows.add_(1)
        both = torch.where(y > 0, y, y.permute(1, 0).sin().t())
        table = torch.nn.functional.embedding(torch.tensor([[0, 2]]), w)
        return z.sum(0), rows.expand(2, -1, -1), both, table.view(-1), torch.max(z, 1)


@pytest.mark.parametrize("table", [None, {}])
def test_calls_that_trace_to_themselves_are_told_without_tracing(
    table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = (torch.randn(4, 3), torch.randn(3, 4))
    program = torch.export.export(Plain(), inputs)
    fewer, found = explain(program, table), decompose(program, table)
    monkeypatch.setattr("lowerdeck.decompose.templates.recorded", lambda *_, **__: None)
    more, traced = explain(program, table), decompose(program, table)
    assert fewer.traces < more.traces / 2
    for one, other in zip(found.graph.nodes, traced.graph.nodes, strict=True):
        assert (one.name, one.target, str(one.args)) == (other.name, other.target, str(other.args))
        assert one.meta.keys() == other.meta.keys()
        if isinstance(one.meta.get("val"), torch.Tensor):
            assert one.meta.get("tensor_meta") == other.meta.get("tensor_meta")
            assert one.meta["val"].storage_offset() == other.meta["val"].storage_offset()
            assert one.meta["val"].stride() == other.meta["val"].stride()
    torch.testing.assert_close(found.module()(*inputs), Plain()(*inputs))


class Sized(nn.Module):
    """Convolutions and norms of many sizes, and some that are cases of their own."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 4, 6, 9)
        self.pairs = nn.ModuleList(
            nn.Sequential(nn.Conv2d(one, other, 3, 1, 1), nn.BatchNorm2d(other))
            for one, other in pairwise(widths)
        )
        self.lines = nn.ModuleList(nn.Conv1d(size, 3, 2, bias=False) for size in (6, 5))
        self.last = nn.Conv2d(9, 2, 3, stride=2, padding="valid").to(
            memory_format=torch.channels_last  # type: ignore[call-overload]
        )
        self.norms = nn.ModuleList(
            [nn.BatchNorm1d(6, affine=False), nn.BatchNorm1d(3).train(), nn.BatchNorm1d(3).train()]
        )

    def forward(self, x: torch.Tensor, none: torch.Tensor) -> Any:
        for pair in self.pairs:
            none = pair(none[:, :1].expand(-1, x.shape[1], -1, -1))
            x = pair(x)
        line = self.norms[0](x[:, :6].flatten(2))
        whole = self.lines[0](line), self.lines[0](line[0]), self.lines[1](line[:, 1:])
        weight: Any = self.last.weight.double()
        wide = nn.functional.conv2d(x.double(), weight.reshape(18, 1, 3, 3), None, 1, 1, 1, 9)
        turned = self.pairs[2](x[:, :6].to(memory_format=torch.channels_last))
        trained = self.norms[1](whole[0]), self.norms[2](whole[2])
        return whole, self.last(x), none, wide, turned, trained


@pytest.mark.parametrize("table", [None, {}, "mine"])
def test_calls_of_other_sizes_are_told_without_tracing(
    table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Sized()
    model.pairs.eval()
    inputs = (torch.randn(2, 3, 8, 8), torch.randn(0, 3, 8, 8))
    program = torch.export.export(model, inputs)
    if table == "mine":
        norm = ATEN._native_batch_norm_legit_no_training.default
        table = {**torch.export.default_decompositions().materialize()}
        table[norm] = lambda x, *_: (x * x.shape[1], x[0, 0, :0], x[0, 0, :0])
    fewer, found = explain(program, table), decompose(program, table)
    assert not differences(found, program.run_decompositions(table))
    monkeypatch.setattr("lowerdeck.decompose.untraced.resized._PARTS", {})
    more, traced = explain(program, table), decompose(program, table)
    assert fewer.traces < more.traces
    assert fewer.traces + fewer.copies == more.traces + more.copies
    for one, other in zip(found.graph.nodes, traced.graph.nodes, strict=True):
        assert (one.name, one.target, str(one.args)) == (other.name, other.target, str(other.args))
        assert one.meta.keys() == other.meta.keys()
        assert one.meta.get("tensor_meta") == other.meta.get("tensor_meta")
        values = (pytree.tree_leaves(node.meta.get("val")) for node in (one, other))
        for mine, theirs in zip(*values, strict=True):
            assert type(mine) is type(theirs)
            if isinstance(mine, torch.Tensor):
                assert (mine.shape, mine.stride()) == (theirs.shape, theirs.stride())


def test_a_network_of_convolutions_needs_few_traces() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(n, n + 1, 3), nn.BatchNorm2d(n + 1)) for n in range(1, 21)]
    program = torch.export.export(nn.Sequential(*layers).eval(), (torch.randn(1, 1, 64, 64),))
    assert explain(program).traces == 2
    wanted = {"traces": 0}

    def volumes(x: torch.Tensor, *_: Any) -> Any:
        wanted["traces"] += 1
        return NotImplemented

    rules = Rules({ATEN.convolution.default: volumes}, {}, by_result=True)
    take_apart(program, rules)
    assert wanted["traces"] == 20, "it may look at sizes"
    volumes.any_size = True  # type: ignore[attr-defined]
    wanted["traces"] = 0
    take_apart(program, rules)
    assert wanted["traces"] == 1
    dims = {0: torch.export.Dim("rows", min=2, max=9)}
    args = (torch.randn(3, 1, 64, 64),)
    program = torch.export.export(nn.Sequential(*layers[:3]).eval(), args, dynamic_shapes=(dims,))
    assert explain(program).traces == 6, "sizes that vary are symbols, with nodes of their own"
