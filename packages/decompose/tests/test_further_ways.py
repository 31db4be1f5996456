"""Effects besides values: autocast, ``set_``, windows, random numbers; rules that return views."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from program_likeness import assert_as_eager, differences  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop

import lowerdeck.decompose
from lowerdeck.decompose import DecomposeError, Rules, decompose, decompose_graph, explain
from lowerdeck_zoo import Of, exported

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
ATEN = torch.ops.aten
X = torch.arange(1.0, 17.0).view(4, 4) / 8


def _branches(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x @ x - 1, (x,))


def _counted(x: Tensor) -> Any:
    loop: Any = while_loop
    return loop(lambda i, _: i < 3, lambda i, t: (i + 1, t * 0.5), (torch.zeros(()), x))[1]


@pytest.mark.parametrize("inner", [_branches, _counted])
def test_autocast_around_control_flow_is_not_lost(inner: Callable[[Tensor], Tensor]) -> None:
    def function(x: Tensor) -> Any:
        before = x @ x
        with torch.autocast("cpu", torch.bfloat16):
            chosen = inner(x)
            product = x @ x
        return before, chosen, product, x @ x

    assert "autocast around control flow" in str(explain(exported(Of(function), X)).reason)
    found = assert_as_eager(Of(function), X)
    assert found.module()(X)[2].dtype is torch.bfloat16


@pytest.mark.parametrize(
    "source",
    [lambda x: x + 1, lambda x: x[1], lambda x: (x * 2).t(), lambda x: x.flatten()[::2]],
    ids=["new", "view", "transposed", "steps"],
)
def test_a_tensor_that_is_set_to_other_memory_shows_that(source: Any) -> None:
    def function(x: Tensor) -> Any:
        made = x.clone()
        made.set_(source(x))
        return made * 2

    assert_as_eager(Of(function), X)


@pytest.mark.parametrize(
    "function",
    [lambda own, x: own.held.set_(x + 1) * 2, lambda own, x: x.set_(x + 1) * 2],
    ids=["buffer", "input"],
)
def test_state_that_is_set_to_other_memory_is_refused(function: Any) -> None:
    with pytest.raises(DecomposeError, match="shape or memory"):
        decompose(exported(Of(function, held=torch.zeros(4, 4)), X.clone()))


def _chain(x: Tensor) -> Any:
    return x.sin().sin() + x


def _written(x: Tensor) -> Any:
    wave = x.sin()
    wave.add_(1)
    return wave, x + 0


def _view(x: Tensor) -> Any:
    whole = x * 1
    wave = whole[1:3].sin()
    wave[0].mul_(3)
    return wave, whole


def _both(x: Tensor) -> Any:
    base = x * 1
    wave = base.sin()
    base.add_(5)
    return wave, base, x.sin()


def _sorted(x: Tensor) -> Any:
    values, indices = torch.sort(x)
    values.add_(1)
    return values, indices + 1, x * 1


def _mean(x: Tensor) -> Any:
    one, other = torch.var_mean(x)
    one.add_(1)
    return one, other


def _twice(x: Tensor, *_: Any) -> Any:
    made = x.sum() * 1
    return made.view(1)[0], ATEN.alias.default(made)


SINE: Any = {ATEN.sin.default: lambda x: x}


@pytest.mark.parametrize(
    ("function", "table"),
    [
        *((function, SINE) for function in (_chain, _written, _view, _both)),
        (_sorted, {ATEN.sort.default: lambda x, *_: (x, x.long())}),
        (_mean, {ATEN.var_mean.correction: _twice, ATEN.var_mean.default: _twice}),
    ],
)
def test_a_rule_that_returns_its_argument_gives_memory_of_its_own(
    function: Any, table: Any
) -> None:
    program = exported(Of(function), X)
    expected = program.run_decompositions(dict(table)).module()(X)
    assert explain(program, table).reason is None
    torch.testing.assert_close(decompose(program, table).module()(X), expected, rtol=0, atol=0)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(
    "rule",
    [lambda x, **_: x.view(x.shape), lambda x, **_: ATEN.alias(x), lambda x, **_: x.t().t()],
)
def test_a_rule_that_returns_a_view_gives_memory_of_its_own(rule: Any, held: bool) -> None:
    def function(own: Any, x: Tensor) -> Any:
        source: Any = own.held if held else x * 2
        made = source.clone()
        made[1:].add_(x[1:])
        return source + 0, made

    assert_as_eager(Of(function, held=torch.ones(4, 4)), X, table={ATEN.clone.default: rule})


def _turned(x: Tensor) -> Tensor:
    # What changes the shape of its argument goes torch's way, and with it the whole program.
    made = x * 1
    made.t_()
    return made


WAYS = pytest.mark.parametrize("prepare", [torch.clone, _turned])


@pytest.mark.parametrize("copies", [False, True])
def test_a_view_that_is_copied_to_a_buffer_is_what_it_was(copies: bool) -> None:
    def function(own: Any, x: Tensor) -> Any:
        own.rows.copy_(own.row.view(3).expand(2, 3))
        out = torch.zeros(2, 3).copy_(own.row.expand(2, 3)) if copies else x * 2
        own.row.mul_(2)
        return x * 3, out

    model, x = Of(function, row=torch.rand(3), rows=torch.rand(2, 3)), torch.rand(2, 3)
    program = exported(model, x)
    assert explain(program).reason is None
    outputs: Any = (
        decompose_graph(program, Rules.of(None)).graph_module.graph.output_node().args[0]
    )
    assert len({id(node) for node in outputs[:2]}) == 2
    assert_as_eager(model, x)


@torch.library.custom_op("lowerdeck_decompose_tests::grow_and_read", mutates_args=("x",))
def grow_and_read(x: Tensor, y: list[Tensor]) -> Tensor:
    x.mul_(2)
    return y[-1] + 1


@grow_and_read.register_fake
def _(_: Tensor, y: list[Tensor]) -> Tensor:
    return torch.empty_like(y[-1])


@WAYS
@pytest.mark.parametrize(
    "write",
    [
        lambda y, x: torch._foreach_add_([y[0], y], 1),
        lambda y, x: torch._foreach_add_([y[0], x[1] + 0], [x[0], y[0]]),
        lambda y, x: y.copy_(grow_and_read(y, [x, y])),
        lambda y, x: y.masked_scatter_(y > 0, y),
        lambda y, x: y[0].expand(4, 4).fill_(3.0),
        lambda y, x: y.unfold(1, 1, 3).mul_(2),
    ],
)
def test_writes_that_overlap_are_what_torch_makes_of_them(write: Any, prepare: Any) -> None:
    # Functionalization reads all arguments of a call before it writes any.
    def function(x: Tensor) -> Any:
        made = prepare(x)
        write(made, x)
        return made

    program = exported(Of(function), X)
    expected = program.run_decompositions().module()(X)
    assert torch.equal(decompose(program).module()(X), expected)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("held", [False, True])
def test_shuffled_channels_have_memory_of_their_own(groups: int, held: bool) -> None:
    def function(own: Any, x: Tensor) -> Any:
        source: Any = own.held if held else x * 2
        made = torch.channel_shuffle(source.view(1, 4, 2, 2), groups)
        made.add_(1)
        return source + 0, made

    assert_as_eager(Of(function, held=torch.zeros(4, 4)), X)


@pytest.mark.parametrize(("p", "train"), [(0.5, False), (0.0, True)])
def test_a_dropout_of_nothing_is_as_exported(p: float, train: bool) -> None:
    def function(x: Tensor) -> Any:
        source = x * 2
        made, mask = torch.native_dropout(source, p, train)
        made.add_(1)
        return source, made, mask

    program = exported(Of(function), X)
    assert explain(program).reason is None
    # torch.export takes the result for the argument already, which eager does not.
    torch.testing.assert_close(decompose(program).module()(X), program.module()(X))


@pytest.mark.parametrize("rule", [lambda x: x.clone().mul_(2), lambda x: x.mul_(2)])
def test_a_rule_that_writes_is_refused(rule: Any) -> None:
    program = exported(Of(lambda x: x.sin() + 1), X)
    table: Any = {ATEN.sin.default: rule}
    with pytest.raises(DecomposeError, match=r"not functional.*aten\.mul_\.Tensor"):
        decompose(program, table)


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
    return lambda x: torch.cat([x.sin() for _ in range(count)])


def _deep_views(count: int) -> Any:
    def function(x: Tensor) -> Any:
        shown = [x]
        for _ in range(count):
            shown.append(shown[-1].t())
        return tuple(shown)

    return function


@pytest.mark.parametrize("of", [_wide, _deep_views])
def test_calls_of_many_tensors_and_views_of_views_cost_what_they_are(of: Any) -> None:
    small, large = (exported(Of(of(count)), X) for count in (50, 100))
    decompose(small)
    assert lines_of(lambda: decompose(large)) < 2.2 * lines_of(lambda: decompose(small))


@pytest.mark.parametrize("keep", [(), [ATEN.gelu.default], {ATEN.gelu.default: lambda call: True}])
def test_a_kept_call_has_the_strides_of_its_input(keep: Any) -> None:
    """Attention with a mask, decomposed, gives other strides than in the original program."""

    class Strides(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            found = super().run_node(n)
            if isinstance(found, Tensor):
                assert found.stride() == n.meta["val"].stride(), n
            return found

    def forward(x: Tensor) -> Any:
        attended = nn.functional.scaled_dot_product_attention(x, x, x, x @ x.mT)
        return nn.functional.gelu(attended).transpose(1, 2).reshape(2, 4, -1)

    x = torch.rand(2, 4, 4, 8).transpose(1, 2)
    Strides(decompose(exported(Of(forward), x), keep=keep).graph_module).run(x)


def test_views_of_attention_with_a_mask_are_refused_as_by_torch() -> None:
    """GPT-2 of transformers with two prompts: the decomposed attention has other strides."""

    def forward(x: Tensor) -> Tensor:
        attended = nn.functional.scaled_dot_product_attention(x, x, x, x @ x.mT)
        return attended.transpose(1, 2).reshape(2, 8, 8).view(-1, 8)

    x = torch.rand(2, 8, 2, 4).transpose(1, 2)
    program = exported(Of(forward), x)
    with pytest.raises(ValueError, match="Cannot view") as refused:
        program.run_decompositions()
    with pytest.raises(DecomposeError, match="add the operator to keep") as error:
        decompose(program)
    assert str(refused.value).partition("!")[0] in str(error.value)
    kept = decompose(program, keep=[ATEN.scaled_dot_product_attention.default])
    torch.testing.assert_close(kept.module()(x), forward(x))


def test_random_numbers_that_nothing_reads_are_drawn() -> None:
    # torch omits them, and what is drawn next is other numbers than eager's.
    def function(x: Tensor) -> Tensor:
        torch.rand_like(x)
        torch.dropout(x, 0.5, train=True)
        torch.empty(3).normal_()
        return x + torch.rand(4)

    found = decompose(exported(Of(function), X)).module(check_guards=False)
    values = []
    for module in (Of(function), found):
        torch.manual_seed(0)
        values.append(module(X))
    torch.testing.assert_close(*values, rtol=0, atol=0)


@pytest.mark.parametrize("part", [lambda y: y, lambda y: y[0, :, 1:], lambda y: y.mT])
def test_results_of_attention_are_written_as_torch_has_it(part: Any) -> None:
    # An operator inside of the composite is decomposed into a view, which need not be inverted.
    def function(x: Tensor) -> Any:
        heads = x.view(1, 2, 2, 4)
        made = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        wide = torch.nn.functional.linear(heads, x)
        for each in (made, wide):
            part(each).mul_(2)
        return made.transpose(1, 2).flatten(2), wide + 1

    program = exported(Of(function), X)
    assert not differences(decompose(program), program.run_decompositions())
    assert_as_eager(Of(function), X)
