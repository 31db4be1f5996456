"""Programs that go torch's way, rules that fail, and what templates and threads share."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from program_likeness import differences, targets  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch._higher_order_ops.effects import _EffectType
from torch.export import default_decompositions
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from lowerdeck.decompose import (
    DecomposeError,
    DecompositionCache,
    Rules,
    decompose,
    decompose_graph,
    explain,
    unwrap_subclass_parameters,
)
from lowerdeck_zoo import Of, exported

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning"),
]
GELU: Any = torch.ops.aten.gelu.default
LINEAR: Any = torch.ops.aten.linear.default
TAKE: Any = torch.ops.aten.take.default


@torch.library.custom_op("lowerdeck_decompose_tests::noted", mutates_args=())
def noted(x: Tensor) -> Tensor:
    return x * 2


noted.register_fake(torch.empty_like)
noted.register_effect(_EffectType.ORDERED)


class Layers(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x


def _exported(width: int, count: int) -> torch.export.ExportedProgram:
    return exported(Layers(width, count), torch.randn(2, width))


def _table(rule: Any) -> Any:
    return {**default_decompositions().materialize(), GELU: rule}


def _decompose_graph(program: torch.export.ExportedProgram, table: Any = None) -> Any:
    return decompose_graph(program, Rules.of(table))


BOTH = (decompose, _decompose_graph)


def test_an_error_of_a_rule_names_its_node() -> None:
    def broken(x: Tensor, approximate: str = "none") -> Tensor:
        raise ZeroDivisionError("no such gelu")

    program, table = _exported(4, 2), _table(broken)
    told = explain(program, table)
    message = r"gelu.default \(node 'gelu', from .*\) cannot be traced: ZeroDivisionError"
    assert told.failed
    assert re.search(message, str(told.reason))
    for way in BOTH:
        with pytest.raises(
            DecomposeError, match=f"{message}: no such gelu; add the operator"
        ) as found:
            way(program, table)
        assert isinstance(found.value.__cause__, ZeroDivisionError)
    assert not explain(program).failed
    assert GELU in targets(decompose(program, table, keep=[GELU]))


def test_a_rule_of_torchs_that_looks_at_data_is_refused() -> None:
    program = exported(Of(lambda x, at: torch.take(x, at) + 1), torch.randn(4), torch.tensor(2))
    try:
        program.run_decompositions()
    except Exception:  # up to 2.14
        assert explain(program).failed
    else:
        assert not explain(program).failed
        return
    for way in BOTH:
        with pytest.raises(DecomposeError, match=r"take.default .* add the operator to keep"):
            way(program)
    assert TAKE in targets(decompose(program, keep=[TAKE]))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass(error: type[BaseException]) -> None:
    def interrupted(x: Tensor, approximate: str = "none") -> Tensor:
        raise error

    with pytest.raises(error):
        decompose(_exported(4, 2), _table(interrupted))


_LIBRARY: Any = torch.library.Library("lowerdeck_decompose_ways", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("viewing(Tensor(a) x) -> Tensor(a)")
_LIBRARY.define("adding_(Tensor(a!) x) -> Tensor(a!)")
_LIBRARY.impl("viewing", lambda x: x.view(-1), "CompositeExplicitAutograd")
_LIBRARY.impl("adding_", lambda x: x.add_(1), "CompositeExplicitAutograd")


@pytest.mark.parametrize("name", ["viewing", "adding_"])
def test_a_custom_operator_that_returns_an_alias_is_refused(name: str) -> None:
    operator = getattr(torch.ops.lowerdeck_decompose_ways, name)
    program = exported(Of(lambda x: operator(x * 2) + 1), torch.ones(2, 3))
    # torch does not functionalize such operators either.
    with pytest.raises(RuntimeError, match="alias annotations"):
        program.run_decompositions()
    for way in BOTH:
        with pytest.raises(DecomposeError, match=f"{name}.default .* traced: .* alias ann"):
            way(program)


def test_a_rule_that_looks_at_numbers_is_refused() -> None:
    def choosing(x: Tensor, approximate: str = "none") -> Tensor:
        return x * 2 if x.sum().item() > 0 else x * 3

    told = explain(_exported(4, 1), _table(choosing))
    assert told.failed
    assert "data-dependent" in str(told.reason)


def test_a_rule_that_makes_unknown_sizes_goes_torchs_way() -> None:
    def finding(x: Tensor, approximate: str = "none") -> Tensor:
        return x + torch.nonzero(x).sum()

    program, table = _exported(4, 3), _table(finding)
    assert "unbacked sizes" in str(explain(program, table).reason)
    assert targets(decompose(program, table)) == targets(program.run_decompositions(table))


def test_a_rule_that_creates_a_constant_is_refused() -> None:
    # torch's own way fails, too.
    program, table = _exported(4, 3), _table(lambda x, **_: x * torch.tensor(2.0))
    with pytest.raises(
        DecomposeError, match=r"create it with torch\.full; run_decompositions fails too"
    ):
        decompose(program, table)


def test_what_torch_fails_on_call_by_call_goes_torchs_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise AttributeError("'bool' object has no attribute 'node'")

    rows = torch.export.Dim("rows", max=9)
    program = exported(Layers(4, 2), torch.randn(2, 4), dynamic_shapes=({0: rows},))
    monkeypatch.setattr("lowerdeck.decompose.decomposing.insert_assertions", fail)
    told = explain(program)
    assert "AttributeError: 'bool' object" in str(told)
    assert told.failed
    assert targets(decompose(program)) == targets(program.run_decompositions())
    _decompose_graph(program)


def _noting(x: Tensor) -> Any:
    return torch.ops.lowerdeck_decompose_tests.noted(x) + 1


def test_operators_with_effects_go_torchs_way() -> None:
    program = exported(Of(_noting), torch.randn(2, 4))
    assert "effect tokens" in str(explain(program))
    found = decompose(program)
    assert not differences(found, program.run_decompositions())
    assert "an input is a TOKEN" in str(explain(found))
    assert not differences(decompose(found), found)


class Product(Tensor):
    """The product of two tensors, which layers multiply with as torchao's tensors are."""

    def __new__(cls, a: Tensor, _: Tensor) -> Product:
        made: Any = Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, requires_grad=False)
        return made  # type: ignore[no-any-return]

    def __init__(self, a: Tensor, b: Tensor) -> None:
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


def _product() -> Any:
    return Product(torch.randn(4, 4), torch.randn(4, 4))


def _hold(model: Any, held: Tensor, way: str) -> None:
    """Give the first layer, or all, a weight that is a tensor subclass."""
    for layer in model.layers if way == "tied" else model.layers[:1]:
        del layer.weight
        if way in ("parameter", "tied"):
            layer.weight = nn.Parameter(held, requires_grad=False)
        else:
            layer.register_buffer("weight", held, persistent=way == "buffer")


def test_subclasses_that_export_left_whole_go_torchs_way() -> None:
    model = Layers(4, 2)
    _hold(model, TwoTensor(torch.randn(4, 4), torch.randn(4, 4)), "parameter")  # type: ignore[no-untyped-call]
    program = exported(model, torch.randn(2, 4))
    assert "'linear' reads the subclass" in str(explain(program))
    assert not differences(decompose(program), program.run_decompositions())


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("way", ["parameter", "tied", "buffer", "left out"])
def test_inner_tensors_of_subclasses_become_inputs(way: str, nested: bool) -> None:
    # torch.export has traced through the subclass already.
    model, weight, x = Layers(4, 2), _product(), torch.randn(2, 4)
    _hold(model, Product(weight, _product()) if nested else weight, way)
    program = exported(model, x)
    before = str(program)
    assert explain(program).reason is None
    found, wanted = decompose(program), program.run_decompositions()
    assert not differences(found, wanted)
    torch.testing.assert_close(found.module()(x), wanted.module()(x))
    assert str(program) == before


@pytest.mark.parametrize("names", [[], ["linear"], ["linear_1", "linear_2"]])
@pytest.mark.parametrize("way", ["plain", "subclass", "effects"])
def test_kept_calls_stay_whatever_the_way(way: str, names: list[str]) -> None:
    model, x = Layers(4, 3), torch.randn(2, 4)
    if way == "subclass":
        _hold(model, _product(), "parameter")
    if way == "effects":
        model.layers.append(Of(_noting))
    # As the pipeline does before partitioners select calls.
    program = unwrap_subclass_parameters(exported(model, x))
    nodes = set(program.graph.nodes)

    def asked(call: torch.fx.Node) -> bool:
        assert call in nodes, "nodes of the program that was given, which partitioners know"
        return call.name in names

    found = decompose(program, keep={LINEAR: asked})
    reason = explain(program).reason
    assert (reason is None) == (way != "effects"), reason
    # torch's own way keeps all calls of an operator, or none.
    wanted = len(names) if reason is None else 3 * bool(names)
    assert targets(found).count(LINEAR) == wanted
    torch.testing.assert_close(found.module()(x), program.run_decompositions().module()(x))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (lambda own, x: torch.mm(own.eye, x), "layout torch.sparse_coo"),
        (lambda own, x: torch.complex(x, x).conj() * 2, "lazily conjugated"),
        (lambda own, x: torch.complex(x, x).conj().imag * 2, "lazily conjugated"),
        (lambda own, x: torch.vmap(torch.sin)(x), "not an operator"),
        (lambda own, x: torch.linalg.cholesky(x @ x.mT + own.eye), "effect tokens"),
        (lambda own, x: (x * 2).squeeze_(0).t_(), "the shape or memory of its argument"),
    ],
    ids=["sparse", "conjugated", "negated", "vmap", "linalg", "reshaped in place"],
)
def test_the_reason_for_torchs_way_is_named(line: Any, reason: str) -> None:
    eye, x = torch.eye(4), torch.rand(4, 4)
    model = Of(line, eye=eye.to_sparse() if "sparse" in reason else eye)
    program = exported(model, x)
    assert reason in str(explain(program))
    torch.testing.assert_close(decompose(program).module()(x), model(x))


@pytest.mark.parametrize("shared", [False, True])
def test_threads_may_decompose_at_once(shared: bool) -> None:
    programs = [_exported(width, 3) for width in (3, 4, 5)] * 2
    expected = [program.run_decompositions() for program in programs]
    cache = DecompositionCache() if shared else None
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda program: decompose(program, cache=cache), programs))
    for one, other in zip(found, expected, strict=True):
        assert not differences(one, other)


@pytest.mark.parametrize("size", [2, 100])
def test_models_share_a_cache_that_stays_small(size: int) -> None:
    cache = DecompositionCache(size)
    for _ in range(2):
        for width, count in ((4, 3), (8, 2)):
            program = _exported(width, count)
            assert not differences(decompose(program, cache=cache), program.run_decompositions())
            assert len(cache) <= size
    assert size == 2 or explain(_exported(8, 7), cache=cache).traces == 0
