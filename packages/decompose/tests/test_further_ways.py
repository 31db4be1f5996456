"""What acts besides giving a value, and rules that give back what they were given."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from program_likeness import differences  # type: ignore[import-not-found]
from torch import nn
from torch._higher_order_ops.while_loop import while_loop

import lowerdeck.decompose
from lowerdeck.decompose import (
    DecomposeError,
    DecompositionCache,
    Rules,
    decompose,
    explain,
    take_apart,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
ATEN = torch.ops.aten
X = torch.arange(1.0, 17.0).view(4, 4) / 8


class Called(nn.Module):
    """Calls a function on itself and the input."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("held", torch.zeros(4, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def exported(function: Callable[..., Any]) -> torch.export.ExportedProgram:
    return torch.export.export(Called(function), (X.clone(),))


def assert_as(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def branches(x: torch.Tensor) -> torch.Tensor:
    chosen: torch.Tensor = torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x @ x - 1, (x,))
    return chosen


def counted(x: torch.Tensor) -> torch.Tensor:
    loop: Any = while_loop
    last: torch.Tensor = loop(
        lambda i, _: i < 3, lambda i, t: (i + 1, t * 0.5), (torch.zeros(()), x)
    )[1]
    return last


@pytest.mark.parametrize("inner", [branches, counted])
def test_autocast_around_control_flow_is_not_lost(
    inner: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def function(_: nn.Module, x: torch.Tensor) -> Any:
        before = x @ x
        with torch.autocast("cpu", torch.bfloat16):
            chosen = inner(x)
            product = x @ x
        return before, chosen, product, x @ x

    program = exported(function)
    assert "autocast around control flow" in str(explain(program).reason)
    found = decompose(program).module()(X)
    assert found[2].dtype is torch.bfloat16
    assert_as(found, Called(function)(X))


@pytest.mark.parametrize(
    "source",
    [lambda x: x + 1, lambda x: x[1], lambda x: (x * 2).t(), lambda x: x.flatten()[::2]],
    ids=["new", "view", "transposed", "steps"],
)
def test_what_is_set_to_other_memory_shows_that(
    source: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def function(_: nn.Module, x: torch.Tensor) -> Any:
        made = x.clone()
        made.set_(source(x))  # type: ignore[call-overload]
        return made * 2

    assert_as(decompose(exported(function)).module()(X), Called(function)(X))


@pytest.mark.parametrize(
    "function",
    [lambda m, x: m.held.set_(x + 1) * 2, lambda _, x: x.set_(x + 1) * 2],
    ids=["buffer", "input"],
)
def test_state_that_is_set_to_other_memory_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(DecomposeError, match="which memory"):
        decompose(exported(function))


def _chain(_: nn.Module, x: torch.Tensor) -> Any:
    return x.sin().sin() + x


def _written(_: nn.Module, x: torch.Tensor) -> Any:
    wave = x.sin()
    wave.add_(1)
    return wave, x + 0


def _view(_: nn.Module, x: torch.Tensor) -> Any:
    whole = x * 1
    wave = whole[1:3].sin()
    wave[0].mul_(3)
    return wave, whole


def _both(_: nn.Module, x: torch.Tensor) -> Any:
    base = x * 1
    wave = base.sin()
    base.add_(5)
    return wave, base, x.sin()


@pytest.mark.parametrize("function", [_chain, _written, _view, _both])
def test_a_rule_that_returns_its_argument_gives_memory_of_its_own(
    function: Callable[..., Any],
) -> None:
    table: Any = {ATEN.sin.default: lambda x: x}
    program = exported(function)
    expected = program.run_decompositions(dict(table)).module()(X)
    assert explain(program, table).reason is None
    assert_as(decompose(program, table).module()(X), expected)


def test_a_rule_may_return_its_argument_among_others() -> None:
    def function(_: nn.Module, x: torch.Tensor) -> Any:
        values, indices = torch.sort(x)
        values.add_(1)
        return values, indices + 1, x * 1

    table: Any = {ATEN.sort.default: lambda x, *_: (x, x.long())}
    program = exported(function)
    expected = program.run_decompositions(dict(table)).module()(X)
    assert_as(decompose(program, table).module()(X), expected)


def test_a_write_through_windows_that_overlap_is_refused() -> None:
    def function(_: nn.Module, x: torch.Tensor) -> Any:
        made = x.clone()
        made.unfold(1, 3, 1)[:, 0].mul_(2)
        return made

    with pytest.raises(DecomposeError, match=r"a write through aten\.unfold"):
        decompose(exported(function))


def _turned(x: torch.Tensor) -> torch.Tensor:
    # What changes the shape of its argument goes torch's way, and with it the whole program.
    made = x * 1
    made.t_()
    return made


@pytest.mark.parametrize("prepare", [torch.clone, _turned])
@pytest.mark.parametrize("copies", [False, True])
def test_what_was_copied_to_a_buffer_is_what_was(
    copies: bool, prepare: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    class Copying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("row", torch.rand(3))
            self.register_buffer("rows", torch.rand(2, 3))

        def forward(self, x: torch.Tensor) -> Any:
            row, rows = self.get_buffer("row"), self.get_buffer("rows")
            rows.copy_(row.view(3).expand(2, 3))
            out = torch.zeros(2, 3).copy_(row.expand(2, 3)) if copies else x * 2
            row.mul_(2)
            return prepare(x), out

    module, x = Copying(), torch.rand(2, 3)
    program = torch.export.export(copy.deepcopy(module), (x,))
    assert (explain(program).reason is None) == (prepare is torch.clone)
    found = decompose(program).module()
    taken = take_apart(program, Rules.of(None))
    outputs: Any = taken.graph_module.graph.output_node().args[0]
    assert len({id(node) for node in outputs[:2]}) == 2
    assert "clone" in outputs[1].name
    assert f"{outputs[1].name} = " in taken.graph_module.code
    for _ in range(2):
        for one, other in zip(found(x), module(x), strict=True):
            torch.testing.assert_close(one, other)
        for name, held in module.named_buffers():
            torch.testing.assert_close(found.get_buffer(name), held)


@pytest.mark.parametrize("prepare", [torch.clone, _turned])
@pytest.mark.parametrize(
    "windows", [(0, 3, 3), (-1, 3, 3), (1, 1, 2), (1, 2, 9), (0, 1, 4), (1, 1, 1)]
)
def test_a_write_through_windows_leaves_what_they_leave_out(
    windows: tuple[int, int, int], prepare: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def function(module: nn.Module, x: torch.Tensor) -> Any:
        made = prepare(x)
        held: Any = module.held
        shown = made.unfold(*windows)
        shown.select(0, 0).mul_(2)
        held.add_(1)
        held.unfold(*windows)[:1].copy_(shown[:1])
        return made, shown, held + 1

    assert_as(decompose(exported(function)).module()(X), Called(function)(X))


@pytest.mark.parametrize("prepare", [torch.clone, _turned])
def test_a_write_through_windows_with_gaps_that_no_slice_tells_is_refused(
    prepare: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def function(_: nn.Module, x: torch.Tensor) -> Any:
        made = prepare(x)
        made.unfold(1, 1, 3).mul_(2)
        return made

    for way in (decompose, lambda program: take_apart(program, Rules.of(None))):
        with pytest.raises(DecomposeError, match="windows leave gaps"):
            way(exported(function))


def test_windows_with_gaps_may_be_read() -> None:
    def function(_: nn.Module, x: torch.Tensor) -> Any:
        made = x.clone()
        shown = made.unfold(1, 1, 3)
        made.mul_(2)
        return shown + 1

    assert_as(decompose(exported(function)).module()(X), Called(function)(X))


@pytest.mark.parametrize("twice", [False, True])
def test_windows_of_a_length_that_varies_may_be_written_where_they_leave_nothing_out(
    twice: bool,
) -> None:
    def function(_: nn.Module, x: torch.Tensor) -> Any:
        made = torch.cat([x, x]) if twice else x.clone()
        made.unfold(0, 2, 2).mul_(2)
        return made

    dims = {0: torch.export.Dim("length", min=3, max=20)}
    program = torch.export.export(Called(function), (X.clone(),), dynamic_shapes={"x": dims})
    if twice:
        # Torch's own rule for such writes asks how long it is, and takes that length alone.
        assert_as(decompose(program).module()(X), Called(function)(X))
    else:
        with pytest.raises(DecomposeError, match="windows leave gaps"):
            decompose(program)


def _viewed(x: torch.Tensor, **_: Any) -> torch.Tensor:
    return x.view(x.shape)


def _twice(x: torch.Tensor, *_: Any) -> Any:
    made = x.sum() * 1
    return made.view(1)[0], ATEN.alias.default(made)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("rule", [_viewed, lambda x, **_: ATEN.alias(x), lambda x, **_: x.t().t()])
def test_a_rule_that_returns_a_view_gives_memory_of_its_own(
    rule: Callable[..., Any], held: bool
) -> None:
    def function(module: nn.Module, x: torch.Tensor) -> Any:
        source: Any = module.held if held else x * 2
        made = source.clone()
        made[1:].add_(x[1:])
        return source + 0, made

    table: Any = {ATEN.clone.default: rule}
    program = exported(function)
    assert explain(program, table).reason is None
    assert_as(decompose(program, table).module()(X), Called(function)(X))


def test_results_of_a_rule_share_no_memory() -> None:
    def function(_: nn.Module, x: torch.Tensor) -> Any:
        one, other = torch.var_mean(x)
        one.add_(1)
        return one, other

    table: Any = {ATEN.var_mean.correction: _twice, ATEN.var_mean.default: _twice}
    program = exported(function)
    expected = program.run_decompositions(dict(table)).module()(X)
    assert_as(decompose(program, table).module()(X), expected)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("held", [False, True])
def test_shuffled_channels_have_memory_of_their_own(groups: int, held: bool) -> None:
    def function(module: nn.Module, x: torch.Tensor) -> Any:
        source: Any = module.held if held else x * 2
        made = torch.channel_shuffle(source.view(1, 4, 2, 2), groups)
        made.add_(1)
        return source + 0, made

    assert_as(decompose(exported(function)).module()(X), Called(function)(X))


@pytest.mark.parametrize(("p", "train"), [(0.5, False), (0.0, True)])
def test_a_dropout_of_nothing_is_as_exported(p: float, train: bool) -> None:
    def function(_: nn.Module, x: torch.Tensor) -> Any:
        source = x * 2
        made, mask = torch.native_dropout(source, p, train)
        made.add_(1)
        return source, made, mask

    program = exported(function)
    assert explain(program).reason is None
    # torch.export takes the result for the argument already, which eager does not.
    assert_as(decompose(program).module()(X), program.module()(X))


def _writing(x: torch.Tensor) -> torch.Tensor:
    return x.clone().mul_(2)


def _writing_its_input(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


@pytest.mark.parametrize("rule", [_writing, _writing_its_input])
@pytest.mark.parametrize(
    "way", [decompose, explain, lambda program, table: take_apart(program, Rules.of(table))]
)
def test_a_rule_that_writes_is_refused(rule: Callable[..., Any], way: Callable[..., Any]) -> None:
    program = exported(lambda _, x: x.sin() + 1)
    with pytest.raises(DecomposeError, match=r"calls aten\.mul_\.Tensor, which writes in place"):
        way(program, {ATEN.sin.default: rule})


def lines_of(function: Callable[[], Any]) -> int:
    """Return how many lines of the package a call runs."""
    package = str(Path(lowerdeck.decompose.__file__).parent)
    count = 0

    def look(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return look if frame.f_code.co_filename.startswith(package) else None

    before = sys.gettrace()
    sys.settrace(look)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def _wide(count: int) -> Any:
    return lambda _, x: torch.cat([x.sin() for _ in range(count)])


def _deep_views(count: int) -> Any:
    def function(_: nn.Module, x: torch.Tensor) -> Any:
        shown = [x]
        for _unused in range(count):
            shown.append(shown[-1].t())
        return tuple(shown)

    return function


@pytest.mark.parametrize("of", [_wide, _deep_views])
def test_calls_of_many_tensors_and_views_of_views_cost_what_they_are(
    of: Callable[[int], Any],
) -> None:
    small, large = (exported(of(count)) for count in (100, 200))
    decompose(small)
    assert lines_of(lambda: decompose(large)) < 2.2 * lines_of(lambda: decompose(small))


class Times:
    """A rule that is equal to others of its kind."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Times)

    def __hash__(self) -> int:
        return 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_a_cache_knows_rules_by_their_identity() -> None:
    cache = DecompositionCache()
    program = exported(lambda _, x: x.sin())
    for factor in (2.0, 3.0):
        table: Any = {ATEN.sin.default: Times(factor)}
        assert_as(decompose(program, table, cache=cache).module()(X), X * factor)


@pytest.mark.parametrize("size", ["a", 1.5, None])
def test_the_size_of_a_cache_is_an_integer(size: Any) -> None:
    with pytest.raises(DecomposeError, match="size of a cache"):
        DecompositionCache(size)


@pytest.mark.parametrize("keep", [[[]], [{}], [None]])
def test_what_cannot_be_kept_is_told(keep: Any) -> None:
    with pytest.raises(DecomposeError, match="keep names"):
        decompose(exported(lambda _, x: x.sin()), keep=keep)


class Lying(torch.fx.Interpreter):
    """Runs a graph whose nodes say how their tensors lie in memory."""

    def run_node(self, n: torch.fx.Node) -> Any:
        found = super().run_node(n)
        if isinstance(found, torch.Tensor):
            assert found.stride() == n.meta["val"].stride(), n
        return found


@pytest.mark.parametrize("keep", [(), [ATEN.gelu.default], {ATEN.gelu.default: lambda call: True}])
def test_a_call_that_stays_lies_in_memory_as_what_it_is_given(keep: Any) -> None:
    """Attention with a mask, taken apart, gives other strides than in the original program."""

    def forward(_: Called, x: torch.Tensor) -> Any:
        attended = nn.functional.scaled_dot_product_attention(x, x, x, x @ x.mT)
        return nn.functional.gelu(attended).transpose(1, 2).reshape(2, 4, -1)

    x = torch.rand(2, 4, 4, 8).transpose(1, 2)
    made = decompose(torch.export.export(Called(forward), (x,)), keep=keep)
    Lying(made.graph_module).run(torch.zeros(4, 4), x)


def test_numbers_that_nobody_reads_are_drawn_all_the_same() -> None:
    # torch leaves them out, and what is drawn next is other numbers than eager's.
    def function(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.rand_like(x)
        torch.dropout(x, 0.5, train=True)
        torch.empty(3).normal_()
        return x + torch.rand(4)

    program = exported(function)
    drawn = []
    for module in (Called(function), decompose(program).module(check_guards=False)):
        torch.manual_seed(0)
        drawn.append(module(X))
    assert_as(*drawn)


@pytest.mark.parametrize("part", [lambda y: y, lambda y: y[0, :, 1:], lambda y: y.mT])
def test_what_attention_gives_is_written_as_torch_has_it(part: Any) -> None:
    # An operator inside of the composite is taken apart into a view, which need not be undone.
    def function(_: nn.Module, x: torch.Tensor) -> Any:
        heads = x.view(1, 2, 2, 4)
        made = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        wide = torch.nn.functional.linear(heads, x)
        for each in (made, wide):
            part(each).mul_(2)
        return made.transpose(1, 2).flatten(2), wide + 1

    program = exported(function)
    found = decompose(program)
    assert not differences(found, program.run_decompositions())
    torch.testing.assert_close(found.module()(X), Called(function)(X))
