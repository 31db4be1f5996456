"""Sizes that vary: what ``decompose`` asks of a program's ``ShapeEnv`` is what torch asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from program_likeness import differences  # type: ignore[import-not-found]
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges

from lowerdeck.decompose import Rules, decompose, decompose_graph, explain, functionalize
from lowerdeck.decompose.templates import Templates
from lowerdeck.torch_base import with_parts
from lowerdeck_zoo import Of

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning"),
]


def _halving(x: torch.Tensor) -> Any:
    rows, columns = x.shape
    half = x[: rows // 2]
    tall = torch.cat([half, x.new_zeros(rows - rows // 2, columns)])
    return tall.reshape(-1, 2).sum(0), nn.functional.gelu(x.repeat(2, 1)).flatten()


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().logical_not()
        made: torch.Tensor = self.layer(x, src_mask=mask)
        return made + torch.arange(x.shape[1])[None, :, None]


def _finding(x: torch.Tensor) -> Any:
    """Find sizes that depend on data, twice by one call."""
    first, second = torch.nonzero(x), torch.nonzero(x)
    count: Any = x.long().sum().item()
    torch._check(count >= 0)  # type: ignore[no-untyped-call]
    torch._check(count <= 100)  # type: ignore[no-untyped-call]
    return first * 2, second + 1, x[x > 0].sum(), torch.zeros(count) + 1


def _writing(own: Any, x: torch.Tensor) -> Any:
    own.cache[: x.shape[0]] = x
    x[1:].add_(1)
    return own.cache[: x.shape[0]] * 2


# Each on images of four sizes that vary, and on what lies otherwise in memory.
LINES: dict[str, Callable[[torch.Tensor], Any]] = {
    "slice": lambda x: x[:2] + 0,
    "slices": lambda x: x[1:, :, 1:-1] * 2,
    "select": lambda x: x[0, 1] + x[-1, -1],
    "narrow": lambda x: x.narrow(2, 1, 2).transpose(1, 3).relu(),
    "narrow to a size": lambda x: x[: x.shape[1]].sum(0),
    "pixel_unshuffle": lambda x: nn.functional.pixel_unshuffle(x[:, :, :4, :4], 2),
    "unfold": lambda x: x.unfold(2, 2, 1).mean(-1),
    "diagonal": lambda x: x.diagonal(0, 2, 3).sum(-1),
    "permute": lambda x: x.permute(2, 0, 3, 1)[1:].contiguous(),
    "expand": lambda x: x[:1].expand(3, -1, -1, -1) + x[:, :1].expand_as(x).sum(0),
    "unbind": lambda x: x[:2].unbind(0)[1] * 2,
    "split": lambda x: torch.split(x[:, :, :4], 2, 2)[1] * 2,
    "chunk": lambda x: x[..., :4].chunk(2, -1)[0] * 2,
    "flatten": lambda x: x[1:].flatten(1).softmax(-1),
    "movedim": lambda x: x.movedim(1, -1)[:, 1:].sum(-1),
    "bytes": lambda x: x[1:].view(torch.int32) + 1,
    "layer_norm": lambda x: nn.functional.layer_norm(x[1:], x.shape[-1:]),
    "interpolate": lambda x: nn.functional.interpolate(x[:2], scale_factor=2.0),
    "pad": lambda x: nn.functional.pad(x[:, 1:], (1, 1, 0, 1)),
    "conv2d": lambda x: nn.functional.conv2d(x[:, :2], x.new_ones(3, 2, 2, 2)),
    "batch_norm": lambda x: nn.functional.batch_norm(x[:, :2], x.new_zeros(2), x.new_ones(2)),
    "written": lambda x: x.clone()[1:].add_(1),
}


def _several(first: int) -> nn.Module:
    """Return a module of every third line."""
    lines = list(LINES.values())[first::3]
    return Of(lambda x: [line(y) for line in lines for y in (x, x.mT)])


def _programs() -> dict[str, Callable[[], ExportedProgram]]:
    n, even = Dim("n", min=3, max=16), 2 * Dim("half", min=2, max=8)

    def of(model: nn.Module, x: torch.Tensor, dims: Any) -> Callable[[], ExportedProgram]:
        return lambda: torch.export.export(model, (x,), dynamic_shapes=dims)

    return {
        "halving": of(Of(_halving), torch.ones(6, 8), (({0: even},),)),
        "halving in both": of(
            Of(_halving), torch.ones(6, 8), (({0: even, 1: 2 * Dim("w", max=9)},),)
        ),
        "attending": of(Attending(), torch.randn(4, 5, 8), ({0: n, 1: Dim("m", max=99)},)),
        "finding in any": of(Of(_finding), torch.ones(5, 4), (({0: n},),)),
        "writing": of(Of(_writing, cache=torch.zeros(16, 8)), torch.ones(5, 8), (({0: n},),)),
        **{
            f"lines {first}": of(_several(first), torch.ones(5, 3, 6, 8), (((Dim.AUTO,) * 4,),))
            for first in range(3)
        },
    }


def _environment(program: ExportedProgram) -> ShapeEnv:
    for node in program.graph.nodes:
        for value in torch.utils._pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                environment: Any = value.fake_mode.shape_env  # type: ignore[attr-defined]
                return environment  # type: ignore[no-any-return]
    raise AssertionError("a program without tensors")


def _asked(program: ExportedProgram) -> dict[str, set[str]]:
    known = _environment(program)
    return {
        "guards": {str(guard.expr) for guard in known.guards},
        "replaced": {
            f"{old}: {new}"
            for old, new in known.replacements.items()
            if not str(old).startswith(("u", "zu"))
        },
        "ranges": {
            f"{symbol}: {bounds}"
            for symbol, bounds in known.var_to_range.items()
            if not str(symbol).startswith(("u", "zu"))
        },
        "divisible": set(map(str, known.divisible)),
    }


@pytest.mark.parametrize("name", _programs())
def test_nothing_is_asked_that_torch_would_not_ask(name: str) -> None:
    export = _programs()[name]
    ours, theirs = export(), export()
    before = _asked(ours)
    assert explain(ours).reason is None
    found, expected = decompose(ours), theirs.run_decompositions()
    for kind, found_here in _asked(ours).items():
        assert kind == "guards" or found_here <= _asked(theirs)[kind] | before[kind], kind
    # What follows from what torch asks is no new guard: it asks more at once, at times.
    asked = _asked(theirs)["guards"] | before["guards"]
    more = [g.expr for g in _environment(ours).guards if str(g.expr) not in asked]
    assert all(_environment(theirs)._maybe_evaluate_static(guard) for guard in more), more
    assert not _environment(ours).pending_fresh_unbacked_symbols
    assert found.range_constraints == expected.range_constraints
    assert more or set(found._guards_code) <= set(expected._guards_code)
    assert not differences(found, expected)


def test_each_unbacked_symbol_is_bound_once() -> None:
    found = decompose(_programs()["finding in any"]())
    bound = [
        str(symbol)
        for node in found.graph.nodes
        for symbol in node.meta.get("unbacked_bindings", {})
    ]
    assert len(set(bound)) >= 3
    assert len(bound) == len(set(bound))
    used = {
        str(symbol)
        for node in found.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
        for size in node.meta["val"].shape
        if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols
        if str(symbol).startswith("u")
    }
    assert used <= set(bound)


def test_ranges_outlive_it_and_the_program_runs_at_other_sizes() -> None:
    module = decompose(_programs()["attending"]()).module()
    for rows, length in ((3, 5), (4, 7), (16, 2)):
        x = torch.randn(rows, length, 8)
        assert module(x).shape == x.shape
    with pytest.raises(AssertionError, match="Guard failed"):
        module(torch.randn(17, 5, 8))


def _questions(work: Callable[[ExportedProgram], Any], depth: int, stride: int) -> int:
    """Return how often ``work`` evaluates an expression of sizes, which strides make longer."""
    layers = [
        layer
        for _ in range(depth)
        for layer in (nn.Conv1d(2, 2, 3, stride, 1), nn.BatchNorm1d(2), nn.ReLU(inplace=True))
    ]
    dims = ({2: Dim("n", min=600, max=4000)},)
    x = torch.ones(1, 2, 1000)
    program = torch.export.export(nn.Sequential(*layers).eval(), (x,), dynamic_shapes=dims)
    environment = type(_environment(program))
    plain, count = environment.evaluate_expr, 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return plain(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(environment, "evaluate_expr", counting)
        work(program)
    return count


def test_copies_ask_little_of_sizes_and_long_expressions_no_more_than_torch() -> None:
    one, eight = _questions(decompose, 1, 1), _questions(decompose, 8, 1)
    assert eight <= one + 7 * 4, (one, eight)
    ours = _questions(decompose, 6, 2)
    theirs = _questions(lambda program: program.run_decompositions(), 6, 2)
    assert ours <= 0.1 * theirs, (ours, theirs)


def test_traces_with_dynamic_sizes_do_not_fill_the_cache_of_fake_tensors() -> None:
    """Copies into it take as long as the trace."""
    x = torch.randn(2, 4, 6, 8)
    table = torch.randn(6, 6, 8)
    dims = ({0: Dim("b", max=8)},)
    product = Of(lambda x: torch.einsum("bhld,lrd->bhlr", x, table))
    program = torch.export.export(product, (x,), dynamic_shapes=(dims,))
    before = FakeTensorMode.cache_info().misses
    torch.testing.assert_close(decompose(program).module()(x), product(x))
    assert FakeTensorMode.cache_info().misses - before <= 2


def test_pooled_lines_of_a_dynamic_batch_are_flattened_without_a_copy() -> None:
    pooled = Of(lambda x: nn.functional.adaptive_avg_pool1d(x.mT, 1).flatten(1))
    dims = ({0: Dim("b", max=8)},)
    program, other = (
        torch.export.export(pooled, (torch.ones(2, 5, 6),), dynamic_shapes=(dims,))
        for _ in range(2)
    )
    assert not differences(decompose(program), other.run_decompositions())


def test_masks_of_dynamic_sizes_are_written_and_filled_without_a_trace() -> None:
    """As in a Swin-T, whose masks number the windows that a shift has joined."""

    def regions(x: torch.Tensor) -> Any:
        mask = x.new_zeros(x.shape[1:])
        for count, rows in enumerate((slice(0, -4), slice(-4, -2), slice(-2, None))):
            for columns in (slice(0, -4), slice(-4, None)):
                mask[rows, columns] = count
        return x + mask

    x = torch.ones(2, 12, 10)
    dims = ({1: Dim("h", min=8, max=50), 2: Dim("w", min=8, max=50)},)
    program = torch.export.export(Of(regions), (x,), dynamic_shapes=(dims,))
    traced = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Templates, "_trace", lambda *call: traced.append(call))
        functional = functionalize(program)
    assert not traced
    operators = {node.target for node in functional.graph.nodes if node.op == "call_function"}
    # Before torch 2.15 the numbers are tensors; since then `fill.Scalar` writes them.
    numbers = 1 if torch.ops.aten.lift_fresh_copy.default in operators else 6
    assert explain(functional).traces == numbers
    found = decompose(functional)
    assert not differences(found, functional.run_decompositions())
    torch.testing.assert_close(found.module()(x[:, 3:]), regions(x[:, 3:]))


def test_later_lowerings_of_a_program_share_traces_of_dynamic_sizes() -> None:
    program = _programs()["attending"]()
    trace, count = Templates._trace, 0

    def counting(*args: Any) -> Any:
        nonlocal count
        count += 1
        return trace(*args)

    def traces(program: ExportedProgram) -> int:
        before = count
        decompose_graph(program, Rules.of(None))
        return count - before

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Templates, "_trace", counting)
        first = traces(program)
        assert first
        assert not traces(program)
        ranges = dict.fromkeys(program.range_constraints, ValueRanges(2, 8))
        assert traces(with_parts(program, range_constraints=ranges)) == first, "rules read ranges"
