"""Which way programs go, what templates outlive, and several threads at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from program_likeness import differences  # type: ignore[import-not-found]
from torch import nn
from torch._higher_order_ops.effects import _EffectType
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from lowerdeck.decompose import (
    DecomposeError,
    DecompositionCache,
    Rules,
    decompose,
    explain,
    take_apart,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning"),
]


@torch.library.custom_op("lowerdeck_decompose_tests::noted", mutates_args=())
def noted(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@noted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


noted.register_effect(_EffectType.ORDERED)

GELU: Any = torch.ops.aten.gelu.default
LINEAR: Any = torch.ops.aten.linear.default


class Layers(nn.Module):
    calls: torch.Tensor

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.forward(x) * self.calls


class Second(nn.Module):
    def __init__(self, model: Layers) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.counted(x)


def _exported(model: nn.Module, width: int) -> torch.export.ExportedProgram:
    return torch.export.export(model, (torch.randn(2, width),))


def _table(rule: Any) -> Any:
    return {**torch.export.default_decompositions().materialize(), GELU: rule}


def test_a_rule_that_fails_is_told_with_its_node_and_its_error() -> None:
    def broken(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
        raise ZeroDivisionError("no such gelu")

    program, table = _exported(Layers(4, 2), 4), _table(broken)
    told = explain(program, table)
    assert told.failed
    message = (
        r"gelu.default \(node 'gelu', from .*\) cannot be traced by itself: ZeroDivisionError"
    )
    assert told.reason is not None
    assert re.search(message, told.reason)
    rules = Rules.of(table)
    for refusing in (lambda: decompose(program, table), lambda: take_apart(program, rules)):
        with pytest.raises(
            DecomposeError, match=f"{message}: no such gelu; keep it whole"
        ) as found:
            refusing()
        assert isinstance(found.value.__cause__, ZeroDivisionError)
    assert not explain(program).failed
    assert GELU in {node.target for node in decompose(program, table, keep=[GELU]).graph.nodes}


class Taking(nn.Module):
    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.take(x, at) + 1


def test_a_rule_of_torchs_that_looks_at_data_is_told_as_any_other() -> None:
    program = torch.export.export(Taking(), (torch.randn(4), torch.tensor(2)))
    try:
        program.run_decompositions()
    except Exception:  # up to 2.14
        assert explain(program).failed
    else:
        assert not explain(program).failed
        torch.testing.assert_close(
            decompose(program).module()(x := torch.randn(4), torch.tensor(1)), x[1] + 1
        )
        return
    for refusing in (decompose, lambda program: take_apart(program, Rules.of(None))):
        with pytest.raises(DecomposeError, match=r"take.default .* keep it whole"):
            refusing(program)
    kept = decompose(program, keep=[torch.ops.aten.take.default])
    assert torch.ops.aten.take.default in {node.target for node in kept.graph.nodes}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_is_no_fault_of_a_rule_goes_by(error: type[BaseException]) -> None:
    def interrupted(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
        raise error

    program, table = _exported(Layers(4, 2), 4), _table(interrupted)
    with pytest.raises(error):
        decompose(program, table)


_LIBRARY: Any = torch.library.Library("lowerdeck_decompose_ways", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("viewing(Tensor(a) x) -> Tensor(a)")
_LIBRARY.define("adding_(Tensor(a!) x) -> Tensor(a!)")
_LIBRARY.impl("viewing", lambda x: x.view(-1), "CompositeExplicitAutograd")
_LIBRARY.impl("adding_", lambda x: x.add_(1), "CompositeExplicitAutograd")


@pytest.mark.parametrize("name", ["viewing", "adding_"])
def test_a_custom_operator_that_returns_an_alias_is_refused_by_our_error(name: str) -> None:
    class Calling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = getattr(torch.ops.lowerdeck_decompose_ways, name)(x * 2) + 1
            return made

    program = torch.export.export(Calling(), (torch.ones(2, 3),))
    # torch makes no such operator functional either.
    with pytest.raises(RuntimeError, match="alias annotations"):
        program.run_decompositions()
    for refusing in (decompose, lambda program: take_apart(program, Rules.of(None))):
        with pytest.raises(DecomposeError, match=f"{name}.default .* traced .* alias ann"):
            refusing(program)


def test_a_rule_that_looks_at_numbers_is_no_template() -> None:
    def choosing(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x * 3

    cache = DecompositionCache()
    program, table = _exported(Layers(4, 1), 4), _table(choosing)
    told = explain(program, table, cache=cache)
    assert told.failed
    assert told.reason is not None
    assert "data-dependent" in told.reason
    assert not [key for key in cache._templates if key[1][0] is GELU]


def test_a_rule_that_makes_unknown_sizes_is_traced_for_each_call() -> None:
    def finding(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
        return x + torch.nonzero(x).sum()

    cache = DecompositionCache()
    program, table = _exported(Layers(4, 3), 4), _table(finding)
    assert explain(program, table, cache=cache).reason is None
    assert not [key for key in cache._templates if key[1][0] is GELU]
    # Tracing gives symbols the numbers that are free, and so other names.
    ours, theirs = decompose(program, table), program.run_decompositions(table)
    targets = [[node.target for node in each.graph.nodes] for each in (ours, theirs)]
    assert targets[0] == targets[1]
    bound = [s for node in ours.graph.nodes for s in node.meta.get("unbacked_bindings", {})]
    assert len({*bound}) == len(bound) == targets[0].count(torch.ops.aten.nonzero.default) == 3
    assert {*bound} <= {*ours.range_constraints}


_SCALE = torch.nn.Parameter(torch.tensor(2.0))


def _doubled_by_outside(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return x * _SCALE


def _doubled_by_new(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return x * torch.tensor(2.0)


def _doubled_by_row(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return torch.tensor([2.0] * 4).view(1, 4) * x


@pytest.mark.parametrize("rule", [_doubled_by_outside, _doubled_by_new, _doubled_by_row])
@pytest.mark.parametrize("table", [{}, None])
def test_a_tensor_that_a_rule_makes_is_a_constant_of_the_program(rule: Any, table: Any) -> None:
    # torch's own way fails on all of them.
    model = Layers(4, 3)
    program = _exported(model, 4)
    own = _table(rule) if table is None else {GELU: rule}
    told = explain(program, own)
    assert told.reason is None
    assert told.copies > 0
    found = decompose(program, own)
    assert list(found.constants) == ["lifted_by_rule_0"]
    x = torch.randn(2, 4)
    with torch.no_grad():
        expected = x
        for layer in model.layers:
            expected = layer(expected) * 2
        torch.testing.assert_close(found.module()(x), expected)
    again = decompose(found)
    torch.testing.assert_close(again.module()(x), expected)


def test_what_torch_fails_on_call_by_call_goes_torchs_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise AttributeError("'bool' object has no attribute 'node'")

    rows = torch.export.Dim("rows", max=9)
    program = torch.export.export(Layers(4, 2), (torch.randn(2, 4),), dynamic_shapes=({0: rows},))
    monkeypatch.setattr("lowerdeck.decompose.decomposing.insert_assertions", fail)
    told = explain(program)
    assert "AttributeError: 'bool' object" in str(told)
    assert told.failed
    found = decompose(program)
    expected = [node.target for node in program.run_decompositions().graph.nodes]
    assert [node.target for node in found.graph.nodes] == expected
    take_apart(program, Rules.of(None))


def test_what_neither_way_takes_apart_is_told() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.cond(x.sum() > 0, nn.functional.gelu, nn.functional.relu, (x,))

    program = torch.export.export(Branching(), (torch.randn(2, 4),))
    with pytest.raises(DecomposeError, match="a constant tensor in a region; nor can torch"):
        decompose(program, _table(_doubled_by_new))


class Noting(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.ops.lowerdeck_decompose_tests.noted(x) + 1


def test_operators_with_effects_go_torchs_way() -> None:
    program = torch.export.export(Noting(), (torch.randn(2, 4),))
    assert "effects that torch orders by tokens" in str(explain(program))
    found = decompose(program)
    assert not differences(found, program.run_decompositions())
    assert "an input is a TOKEN" in str(explain(found))
    assert not differences(decompose(found), found)


class Product(torch.Tensor):
    """The product of two tensors, which layers multiply with as torchao's tensors are."""

    def __new__(cls, a: torch.Tensor, _: torch.Tensor) -> Product:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, a.shape, dtype=a.dtype, requires_grad=False
        )
        return made  # type: ignore[no-any-return]

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> Product:
        return Product(inner["a"], inner["b"])

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is nn.functional.linear:
            x, weight, bias = args
            return function(x, _dense(weight), bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # What nn.Parameter and the tracer ask for: a tensor on the same memory.
        (held,) = args
        made = cls(function(held.a), function(held.b))
        return return_and_correct_aliasing(function, args, kwargs or {}, made)  # type: ignore[no-untyped-call]


def _dense(held: Any) -> Any:
    return _dense(held.a) * _dense(held.b) if isinstance(held, Product) else held


def _product(*tensors: torch.Tensor) -> torch.Tensor:
    return Product(*tensors)


def _parameter(model: nn.Module, held: torch.Tensor) -> None:
    model.layers[0].weight = nn.Parameter(held, requires_grad=False)  # type: ignore[index,union-attr]


def _tied(model: nn.Module, held: torch.Tensor) -> None:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.weight = nn.Parameter(held, requires_grad=False)


def _buffer(model: nn.Module, held: torch.Tensor) -> None:
    del model.layers[0].weight  # type: ignore[index,union-attr]
    model.layers[0].register_buffer("weight", held)  # type: ignore[index,union-attr]


def _left_out(model: nn.Module, held: torch.Tensor) -> None:
    del model.layers[0].weight  # type: ignore[index,union-attr]
    model.layers[0].register_buffer("weight", held, persistent=False)  # type: ignore[index,union-attr]


def test_subclasses_that_export_left_whole_go_torchs_way() -> None:
    # Each call is whatever the subclass makes of it.
    model = Layers(4, 2)
    held = TwoTensor(torch.randn(4, 4), torch.randn(4, 4))  # type: ignore[no-untyped-call]
    _parameter(model, held)
    program = _exported(model, 4)
    assert "is a tensor subclass, and 'linear' reads" in str(explain(program))
    assert not differences(decompose(program), program.run_decompositions())


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("hold", [_parameter, _tied, _buffer, _left_out])
def test_inner_tensors_of_subclasses_become_inputs(hold: Any, nested: bool) -> None:
    # torch.export has traced through the subclass already.
    model = Layers(4, 2)
    weight = _product(torch.randn(4, 4), torch.randn(4, 4))
    if nested:
        weight = _product(weight, _product(torch.randn(4, 4), torch.randn(4, 4)))
    hold(model, weight)
    program = _exported(model, 4)
    before = str(program)
    assert explain(program).reason is None
    found, wanted = decompose(program), program.run_decompositions()
    assert not differences(found, wanted)
    x = torch.randn(2, 4)
    torch.testing.assert_close(found.module()(x), wanted.module()(x))
    assert str(program) == before


@pytest.mark.parametrize("names", [[], ["linear"], ["linear_1", "linear_2"]])
@pytest.mark.parametrize("way", ["plain", "subclass", "effects"])
def test_what_is_asked_to_stay_stays_whatever_the_way(way: str, names: list[str]) -> None:
    model = Layers(4, 3)
    if way == "subclass":
        _parameter(model, _product(torch.randn(4, 4), torch.randn(4, 4)))
    if way == "effects":
        model.layers.append(Noting())
    program = torch.export.export(model, (torch.randn(2, 4),))
    nodes = set(program.graph.nodes)

    def asked(call: torch.fx.Node) -> bool:
        # Nodes of the program that was given, by which partitioners know them.
        assert call in nodes
        return call.name in names

    found = decompose(program, keep={LINEAR: asked})
    reason = explain(program).reason
    assert (reason is None) == (way != "effects"), reason
    # torch's own way keeps all calls of an operator, or none.
    wanted = len(names) if reason is None else 3 * bool(names)
    assert [n.target for n in found.graph.nodes].count(LINEAR) == wanted
    x = torch.randn(2, 4)
    torch.testing.assert_close(found.module()(x), program.run_decompositions().module()(x))


class Told(nn.Module):
    """A program of one line, beside a buffer that is sparse."""

    eye: torch.Tensor

    def __init__(self, line: Callable[..., Any]) -> None:
        super().__init__()
        self.register_buffer("eye", torch.eye(4).to_sparse())
        self.line = line

    def forward(self, x: torch.Tensor) -> Any:
        return self.line(self, x)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (lambda self, x: torch.mm(self.eye, x), "layout torch.sparse_coo"),
        (lambda self, x: torch.complex(x, x).conj() * 2, "lazily conjugated"),
        (lambda self, x: torch.complex(x, x).conj().imag * 2, "lazily conjugated"),
        (lambda self, x: torch.vmap(torch.sin)(x), "which is no operator"),
        (lambda self, x: torch.linalg.cholesky(x @ x.mT + self.eye.to_dense()), "effects"),
        (
            lambda self, x: (x * 2).squeeze_(0).t_(),
            "changes in place how its argument shows memory",
        ),
    ],
    ids=["sparse", "conjugated", "negated", "vmap", "linalg", "reshaped in place"],
)
def test_what_goes_torchs_way_is_named(line: Any, reason: str) -> None:
    model, x = Told(line), torch.rand(4, 4)
    if "sparse" not in reason:
        model.eye = torch.eye(4)
    program = torch.export.export(model, (x,))
    assert reason in str(explain(program))
    torch.testing.assert_close(decompose(program).module()(x), model(x))


@pytest.mark.parametrize("shared", [False, True])
def test_threads_may_decompose_at_once(shared: bool) -> None:
    programs = [_exported(Layers(width, 3), width) for width in (3, 4, 5, 6)] * 2
    expected = [program.run_decompositions() for program in programs]
    cache = DecompositionCache() if shared else None
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda program: decompose(program, cache=cache), programs))
    for one, other in zip(found, expected, strict=True):
        assert not differences(one, other)


@pytest.mark.parametrize("size", [2, 100])
def test_models_and_methods_share_a_cache_that_stays_small(size: int) -> None:
    cache = DecompositionCache(size)
    small, wide = Layers(4, 3), Layers(8, 2)
    for _ in range(2):
        for model, width in ((small, 4), (Second(small), 4), (wide, 8), (Second(wide), 8)):
            program = _exported(model, width)
            assert not differences(decompose(program, cache=cache), program.run_decompositions())
            assert len(cache) <= size
    if size == 100:
        assert explain(_exported(Layers(8, 7), 8), cache=cache).traces == 0
        assert explain(_exported(Second(Layers(4, 7)), 4), cache=cache).traces == 0


class Laid(nn.Module):
    """Asks how the result of an attention with a mask lies, which taken apart lies otherwise."""

    def __init__(self, ask: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.ask(nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask))


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.transpose(1, 2).reshape(2, 12, 32).view(-1, 32) * 2,
        lambda x: x.as_strided((2, 12, 32), (384, 32, 1)),
        lambda x: x.as_strided((2, 5), (32, 1), 3),
        lambda x: torch.as_strided_copy(x, (2, 12, 32), (384, 32, 1)),
    ],
    ids=["view", "as_strided", "a part", "copy"],
)
def test_results_lie_as_the_rest_of_the_program_was_told(ask: Any) -> None:
    inputs = torch.rand(2, 4, 12, 8), torch.rand(2, 1, 12, 12) > 0.2
    model = Laid(ask)
    program = torch.export.export(model, inputs)
    assert "as a whole" not in str(explain(program))
    torch.testing.assert_close(decompose(program).module()(*inputs), model(*inputs))


def test_writes_to_what_lies_otherwise_are_refused() -> None:
    def ask(x: torch.Tensor) -> torch.Tensor:
        x.as_strided((24, 32), (32, 1)).mul_(2)
        return x + 1

    inputs = torch.rand(2, 4, 12, 8), torch.rand(2, 1, 12, 12) > 0.2
    with pytest.raises(DecomposeError, match="lies otherwise in memory"):
        decompose(torch.export.export(Laid(ask), inputs))


@pytest.mark.parametrize("dims", [(0,), (0, 2)])
def test_results_of_dynamic_sizes_lie_so_too_without_a_guard(dims: tuple[int, ...]) -> None:
    model = Laid(lambda x: x.transpose(1, 2).reshape(x.shape[0], -1, 32).view(-1, 32) * 2)
    inputs = torch.rand(2, 4, 12, 8), torch.rand(2, 1, 12, 12) > 0.2
    sizes = {0: torch.export.Dim("rows", min=2, max=9), 2: torch.export.Dim("long", min=2, max=20)}
    shapes = (
        {dim: sizes[dim] for dim in dims},
        {0: sizes[0], **({2: sizes[2], 3: sizes[2]} if 2 in dims else {})},
    )
    program = torch.export.export(model, inputs, dynamic_shapes=shapes)
    value = next(iter(program.graph.nodes)).meta["val"]
    guards = len(value.fake_mode.shape_env.guards)
    taken = decompose(program)
    assert len(value.fake_mode.shape_env.guards) == guards
    long = 7 if 2 in dims else 12
    others = torch.rand(5, 4, long, 8), torch.rand(5, 1, long, long) > 0.2
    torch.testing.assert_close(taken.module()(*others), model(*others))
