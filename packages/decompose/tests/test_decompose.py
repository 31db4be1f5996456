"""``decompose`` returns torch's program, and traces each distinct call once."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from program_likeness import assert_as_eager, differences, targets  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.export import default_decompositions
from torch.fx import Graph, Node
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

from lowerdeck.decompose import (
    DecomposeError,
    DecompositionCache,
    Rules,
    can_keep,
    decompose,
    decompose_graph,
    explain,
)
from lowerdeck_zoo import Of, Program, exported, programs

ATEN = torch.ops.aten
X = torch.linspace(-1, 1, 16).view(2, 8)

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning"),
]


def blocks(count: int) -> Any:
    """Return a program of residual blocks, all of which are alike."""
    layers = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(count)]

    def forward(self: Any, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.reshape(-1)

    return exported(Of(forward, blocks=nn.ModuleList(layers)), X)


# tests/retraced has all of them, in the core table.
CHOSEN = programs(without="large several-methods complex vision")[::8]


@pytest.mark.parametrize(
    ("program", "table"),
    [(program, None) for program in CHOSEN] + [(program, {}) for program in CHOSEN[1::4]],
    ids=str,
)
def test_programs_come_out_as_torch_gives_them(program: Program, table: Any) -> None:
    given = program.export_anew()
    before = str(given)
    assert explain(given, table).reason is None
    found = decompose(given, table)
    assert str(given) == before
    assert not differences(found, given.run_decompositions(table))
    program.compare(found.module()(*program.calls()[0].args), program.results()[0].outputs)


@pytest.mark.parametrize("count", [4, 40])
def test_each_distinct_call_is_traced_once(count: int) -> None:
    told = explain(blocks(count))
    # Gelu and add are copied from the program, linear and layer_norm from their traces.
    assert told.traces == 3
    assert told.copies == 2 * count - 2


def test_a_second_program_of_a_family_needs_no_trace() -> None:
    cache = DecompositionCache()
    second = blocks(5)
    assert explain(blocks(2), cache=cache).traces == 3
    assert explain(second, cache=cache).traces == 0
    assert not differences(decompose(second, cache=cache), second.run_decompositions())
    assert explain(second, {}, cache=cache).traces == 1, "another table, other templates"


@pytest.mark.parametrize("size", [0, "a", 1.5, None])
def test_a_cache_is_bounded(size: Any) -> None:
    cache = DecompositionCache(3)
    decompose(blocks(1), cache=cache)
    assert len(cache) == 3
    with pytest.raises(DecomposeError, match="at least 1" if size == 0 else "size of a cache"):
        DecompositionCache(size)


def test_kept_operators_stay_whole() -> None:
    program = blocks(3)
    found = decompose(program, keep=[ATEN.linear.default, ATEN.gelu.default])
    called = targets(found)
    assert called.count(ATEN.linear.default) == called.count(ATEN.gelu.default) == 3
    assert ATEN.addmm.default not in called
    table: Any = default_decompositions()
    del table[ATEN.linear.default]
    table.pop(ATEN.gelu.default, None)
    assert not differences(found, program.run_decompositions(table))


def test_some_calls_of_an_operator_stay_whole_and_others_do_not() -> None:
    program = blocks(3)
    asked = []

    def second(call: Node) -> bool:
        asked.append(call.target)
        return "linear_1" in call.name

    cache = DecompositionCache()
    keep = {ATEN.linear.default: second, ATEN.gelu.default: None}
    found = decompose(program, keep=keep, cache=cache)
    called = targets(found)
    assert called.count(ATEN.linear.default) == 1
    assert called.count(ATEN.addmm.default) == 2
    assert called.count(ATEN.gelu.default) == 3
    assert asked == [ATEN.linear.default] * 3
    assert torch.equal(found.module()(X), program.module()(X))
    # What is kept by call makes no template: those of others serve all.
    size = len(cache)
    decompose(program, keep={ATEN.linear.default: lambda call: False, **keep}, cache=cache)
    assert len(cache) == size


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ({ATEN.t.default: lambda call: True}, r"aten\.t\.default cannot be kept in part"),
        ({ATEN.linear.default: True}, "expected a predicate on nodes"),
        ([ATEN.reshape.default], r"aten\.reshape\.default cannot be kept"),
        ([ATEN.linear], "expected operator overloads"),
        ([None], "keep contains"),
    ],
)
def test_what_cannot_be_kept_is_refused(keep: Any, message: str) -> None:
    with pytest.raises(DecomposeError, match=message):
        decompose(blocks(1), keep=keep)


def test_can_keep_tells_so_before() -> None:
    asked = [ATEN.reshape.default, ATEN.linear, ATEN.linear.default, ATEN.relu.default]
    assert list(map(can_keep, asked)) == [False, False, True, True]
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
    ],
    ids=range(5),
)
def test_a_buffer_keeps_its_strides_when_it_is_copied_to(seen: Any) -> None:
    # torch omits the copy, and then views see what was copied, in its own order.
    def forward(self: Any, x: Tensor) -> Any:
        return seen(self.table.copy_(x.t())), self.table * 1, x + 1

    assert_as_eager(
        Of(forward, table=torch.zeros(4, 3)), torch.arange(12.0).reshape(3, 4), calls=1
    )


def test_rules_of_the_user_are_used() -> None:
    program = blocks(2)
    table = {**default_decompositions().materialize()}
    table[ATEN.gelu.default] = lambda x, approximate="none": x * torch.sigmoid(1.702 * x)
    found = decompose(program, table)
    assert not differences(found, program.run_decompositions(table))
    assert ATEN.sigmoid.default in targets(found)


def test_nodes_know_where_they_come_from() -> None:
    program, handle = blocks(2), {"owner": 7}
    linear = next(node for node in program.graph.nodes if node.name == "linear_1")
    linear.meta["custom"] = handle
    found = decompose(program)
    made = [n for n in found.graph.nodes if n.meta.get("custom") == handle]
    assert [node.target for node in made] == [ATEN.permute.default, ATEN.addmm.default]
    assert all(node.meta["from_node"][-1].name == "linear_1" for node in made)


def test_values_of_copies_have_memory_of_their_own() -> None:
    found = decompose(blocks(2))
    nodes = found.graph.find_nodes(op="call_function", target=ATEN.addmm.default)
    assert len({node.meta["val"].untyped_storage()._cdata for node in nodes}) == len(nodes) == 2


def test_a_deep_copy_stays_as_it_was() -> None:
    class Builtin(nn.Module):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return input.add_(1)

    program = copy.deepcopy(exported(Builtin(), torch.ones(2)))
    names = [node.name for node in program.graph.nodes]
    found = decompose(program)
    assert explain(program).reason is None
    assert [node.name for node in program.graph.nodes] == names
    assert [spec.target for spec in found.graph_signature.output_specs] == ["input", None]


def _copying(self: Any, x: Tensor, given: Tensor) -> Any:
    # torch's own way loses some of these copies, and fails on others.
    self.cache.copy_(x * 2)
    self.wide.fill_(x.sum())
    self.halved.copy_(x)
    self.again.copy_(self.cache)
    given.copy_(x[0])
    return self.cache, self.wide[0], x * 3


def test_buffers_keep_shape_and_dtype_when_they_are_copied_to() -> None:
    held = {name: torch.zeros(2, 8) for name in ("cache", "wide", "again")}
    model = Of(_copying, **held, halved=torch.zeros(2, 8, dtype=torch.float16))
    found = assert_as_eager(model, X, X[0])
    nodes = found.graph.output_node().args[0]
    for spec, node in zip(found.graph_signature.output_specs, nodes, strict=True):
        if spec.target in found.state_dict:
            buffer, value = found.state_dict[spec.target], node.meta["val"]
            assert (buffer.shape, buffer.dtype) == (value.shape, value.dtype)


def test_no_buffer_is_read_after_it_was_written_for_another() -> None:
    # torch returns the placeholder of one buffer as the new value of another, and writes the
    # first before it reads the second.
    def forward(self: Any, x: Tensor) -> Any:
        old = self.one.clone()
        self.one.copy_(self.two)
        self.turned.copy_(self.two.t())
        self.two.copy_(old)
        self.two.add_(x)
        return self.turned, torch.where(x > 0, x, self.turned)

    held = {name: torch.randn(3, 3) for name in ("one", "two", "turned")}
    assert_as_eager(Of(forward, **held), torch.randn(3, 3))


def test_a_change_of_shape_in_place_goes_torchs_way() -> None:
    program = exported(Of(lambda x: (x * 2).unsqueeze_(0).relu()), X)
    told = explain(program)
    assert told.reason is not None
    assert "the shape or memory of its argument" in str(told)
    assert not differences(decompose(program), program.run_decompositions())
    assert ATEN.relu.default in targets(decompose(program, keep=[ATEN.relu.default]))
    called = _targets(decompose_graph(program, Rules({}, {})).graph_module.graph)
    assert ATEN.relu.default in called
    assert not any("squeeze_" in str(target) for target in called)


@torch.library.custom_op("lowerdeck_decompose_tests::added", mutates_args=("out", "more"))
def added(x: Tensor, out: Tensor, more: list[Tensor], last: Tensor | None = None) -> Tensor:
    out.add_(x)
    for each in more:
        each.mul_(2)
    return x * 2 if last is None else x + last


@added.register_fake
def _(x: Any, out: Any, more: Any, last: Any = None) -> Tensor:
    return torch.empty_like(x)


def _adding(self: Any, x: Tensor, given: Tensor) -> Any:
    """Call a custom operator on a buffer, an input and values, one twice, one alike."""
    own: Any = torch.ops.lowerdeck_decompose_tests.added
    y = x.sin()
    first = own(x, self.sums, [given, y])
    y[0] += 1
    second = own(x, y, [], self.sums)
    third = own(self.sums[:1], x[:1].clone(), [y.t().contiguous()])
    return first, second, third, y, self.sums[1], given.sum()


@pytest.mark.parametrize("dynamic", [False, True])
def test_custom_operators_that_write_are_decomposed_call_by_call(dynamic: bool) -> None:
    inputs = (torch.randn(3, 4), torch.randn(2, 4))
    shapes = ((None, {0: torch.export.Dim("rows", min=2, max=9)}),) if dynamic else None
    model, sine = Of(_adding, sums=torch.zeros(3, 4)), ATEN.sin.default
    program = exported(model, *inputs, dynamic_shapes=shapes)
    assert explain(program).reason is None
    assert not differences(decompose(program), program.run_decompositions())
    assert_as_eager(model, *inputs, calls=1, shapes=shapes)
    # A compiler decomposes a program again that was decomposed before.
    once = decompose(program, keep=[sine])
    table: dict[Any, Any] = {sine: lambda x: torch.cos(x - torch.pi / 2)}
    assert explain(once, table).reason is None
    found = decompose(once, table)
    assert sine not in targets(found)
    assert torch.ops.higher_order.auto_functionalized_v2 in targets(found)
    given = [[each.clone() for each in inputs] for _ in range(2)]
    eager = copy.deepcopy(model)
    results = found.module()(*given[0]), eager(*given[1])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(given[0], given[1])


@pytest.mark.parametrize("part", [lambda x: x[1:], lambda x: x.t()], ids=["rows", "transposed"])
def test_custom_operators_that_write_views_go_torchs_way(part: Any) -> None:
    def forward(x: Tensor) -> Any:
        y = x * 2
        own: Any = torch.ops.lowerdeck_decompose_tests.added
        return own(part(x), part(y), []), y

    program = exported(Of(forward), torch.randn(3, 4))
    assert "writes a view" in str(explain(program))
    assert not differences(decompose(program), program.run_decompositions())


def test_buffers_that_overlap_are_not_written() -> None:
    whole = torch.zeros(6)
    model = Of(lambda self, x: self.one.add_(x) + self.other, one=whole[:4], other=whole[2:])
    program = exported(model, torch.ones(4))
    told = "'one' and 'other' overlap in memory, and 'add_' writes it"
    assert explain(program).reason == told
    with pytest.raises(DecomposeError, match=told):
        decompose(program)


def _targets(graph: Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_rules_may_keep_one_call_and_decompose_the_next() -> None:
    silu = nn.functional.silu
    program = exported(Of(lambda x: silu(x) + silu(x.double()).float()), X)

    def narrow(x: Tensor) -> Any:
        return x * torch.sigmoid(x) if x.dtype is torch.float32 else NotImplemented

    parts = decompose_graph(program, Rules({ATEN.silu.default: narrow}, {}))
    found = _targets(parts.graph_module.graph)
    assert found.count(ATEN.sigmoid.default) == found.count(ATEN.silu.default) == 1


def test_rules_that_look_at_the_result_are_asked_for_each_result() -> None:
    asked: list[tuple[int, ...]] = []

    def rule(x: Tensor) -> Any:
        asked.append(fx_traceback.get_current_meta().get("val", x).stride())
        return NotImplemented

    program = blocks(3)
    gelu = program.graph.find_nodes(op="call_function", target=ATEN.gelu.default)[1]
    # As where an operator before it was decomposed into another layout.
    gelu.meta["val"] = gelu.meta["val"].t().contiguous().t()
    decompose_graph(program, Rules({ATEN.gelu.default: rule}, {}, by_result=True))
    assert asked == [(8, 1), (1, 2), (8, 1)]
    asked.clear()
    decompose_graph(program, Rules({ATEN.gelu.default: rule}, {}))
    assert len(asked) == 1


def _plain(x: Tensor, w: Tensor) -> Any:
    """Call what traces to itself, each in several layouts, with writes in between."""
    y = torch.sin(x.t()) + w
    y.mul_(2)
    z = torch.cat([y, y.t().contiguous().t()], 1)
    rows = z[1:, ::2].unsqueeze(0)
    rows.add_(1)
    both = torch.where(y > 0, y, y.permute(1, 0).sin().t())
    table = torch.nn.functional.embedding(torch.tensor([[0, 2]]), w)
    return z.sum(0), rows.expand(2, -1, -1), both, table.view(-1), torch.max(z, 1)


class Sized(nn.Module):
    """Convolutions and norms of many sizes, and some that are cases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(
            nn.Sequential(nn.Conv2d(one, other, 3, 1, 1), nn.BatchNorm2d(other)).eval()
            for one, other in pairwise((3, 4, 6, 9))
        )
        self.lines = nn.ModuleList(nn.Conv1d(size, 3, 2, bias=False) for size in (6, 5))
        self.last = nn.Conv2d(9, 2, 3, stride=2, padding="valid").to(
            memory_format=torch.channels_last  # type: ignore[call-overload]
        )
        self.norms = nn.ModuleList(
            [nn.BatchNorm1d(6, affine=False), nn.BatchNorm1d(3).train(), nn.BatchNorm1d(3).train()]
        )

    def forward(self, x: Tensor, none: Tensor) -> Any:
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


def _own_norm(x: Tensor, *_: Any) -> Any:
    return x * x.shape[1], x[0, 0, :0], x[0, 0, :0]


@pytest.mark.parametrize(
    ("way", "table"),
    [
        ("templates.record_untraced", None),
        ("untraced._PARTS", None),
        ("untraced._PARTS", {}),
        ("untraced._PARTS", "mine"),
    ],
)
def test_calls_that_need_no_trace_come_out_as_traced_ones(
    way: str, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    sized = way.startswith("untraced")
    model = Sized() if sized else Of(_plain)
    inputs = (torch.randn(2, 3, 8, 8), torch.randn(0, 3, 8, 8))
    inputs = inputs if sized else (torch.randn(4, 3), torch.randn(3, 4))
    program = torch.export.export(model, inputs)
    if table == "mine":
        norm = ATEN._native_batch_norm_legit_no_training.default
        table = {**default_decompositions().materialize(), norm: _own_norm}
    fewer, found = explain(program, table), decompose(program, table)
    assert not differences(found, program.run_decompositions(table))
    monkeypatch.setattr(f"lowerdeck.decompose.{way}", {} if sized else lambda *_, **__: None)
    more, traced = explain(program, table), decompose(program, table)
    assert fewer.traces < more.traces
    for one, other in zip(found.graph.nodes, traced.graph.nodes, strict=True):
        assert (one.name, one.target, str(one.args)) == (other.name, other.target, str(other.args))
        assert one.meta.keys() == other.meta.keys()
        assert one.meta.get("tensor_meta") == other.meta.get("tensor_meta")
        values = (pytree.tree_leaves(node.meta.get("val")) for node in (one, other))
        for mine, theirs in zip(*values, strict=True):
            assert type(mine) is type(theirs)
            if isinstance(mine, Tensor):
                assert (mine.shape, mine.stride()) == (theirs.shape, theirs.stride())


def test_a_network_of_convolutions_needs_few_traces() -> None:
    layers = [nn.Sequential(nn.Conv2d(n, n + 1, 3), nn.BatchNorm2d(n + 1)) for n in range(1, 13)]
    program = exported(nn.Sequential(*layers), torch.randn(1, 1, 40, 40))
    assert explain(program).traces == 0
    asked = []

    def last(x: Tensor, *_: Any) -> Any:
        asked.append(x.shape[1])
        wider = torch.cat([x, x[:, :1]], 1)[:, :, 2:, 2:]
        return wider if x.shape[1] == 12 else NotImplemented

    parts = decompose_graph(program, Rules({ATEN.convolution.default: last}, {}, by_result=True))
    assert asked == [*range(1, 13), 12], "one is traced, where the rule does not return it"
    targets = [node.target for node in parts.graph_module.graph.nodes]
    assert targets.count(ATEN.convolution.default) == 11
    dims = {0: torch.export.Dim("rows", min=2, max=9), 2: torch.export.Dim("high", min=9, max=50)}

    def masked(of: Any, x: Tensor) -> Any:
        x = nn.functional.relu_(of.layers(x))
        mask = (x > 0) & (x < 1)
        filled = x.multiply(x).masked_fill(mask, -1.0) + torch.where(mask, x, 2.0).to(x)
        return nn.functional.pad(filled.to(torch.float64), (0, 1, x.shape[0], 2)), mask.to(x)

    model = Of(masked, layers=nn.Sequential(*layers[:3])).eval()
    program = exported(model, torch.randn(3, 1, 40, 40), dynamic_shapes=((dims,),))
    assert explain(program).traces == 0
    assert not differences(decompose(program), program.run_decompositions())
    modes = []

    def kept(*_: Any) -> Any:
        modes.append(get_proxy_mode())
        return NotImplemented

    rolled = Of(lambda x: x.roll(1, 1))
    program = exported(rolled, torch.randn(3, 4), dynamic_shapes=(({0: dims[0]},),))
    decompose_graph(program, Rules({ATEN.roll.default: kept}, {}, by_result=True))
    assert modes == [None], "a rule that keeps a call is not traced"
