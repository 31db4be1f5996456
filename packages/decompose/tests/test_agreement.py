"""A rule of a table gives what the operator gives, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch.export import Dim, ExportedProgram, default_decompositions

from lowerdeck.decompose import (
    DecomposeError,
    DecompositionCache,
    Rules,
    decompose,
    explain,
    take_apart,
)
from lowerdeck_zoo import Of, exported

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
ATEN = torch.ops.aten


def _exported(called: Callable[..., Any], *, dynamic: bool = False) -> ExportedProgram:
    shapes = (({0: Dim.DYNAMIC},),) if dynamic else None
    return exported(Of(called), torch.rand(4, 3), dynamic_shapes=shapes)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x)


def _branches(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, _gelu, torch.sin, (x,))


# What a gelu may be replaced by, wrongly, and what is told of it.
WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "dtype": (lambda x, **_: ATEN.relu.default(x).half(), r"torch.float16 \[.*, 3\] on cpu"),
    "rank": (lambda x, **_: ATEN.sum.default(x), r"torch.float32 \[\] on cpu"),
    "size": (lambda x, **_: ATEN.slice.Tensor(x, 1, 0, 2), r"torch.float32 \[.*, 2\] on cpu"),
    "device": (lambda x, **_: x.to("meta"), r"torch.float32 \[.*, 3\] on meta"),
    "nothing": (lambda x, **_: None, "gives None"),
    "partial": (
        partial(lambda x, dtype, **_: x.to(dtype), dtype=torch.int64),
        r"torch.int64 \[.*, 3\] on cpu",
    ),
}


def _parts(program: ExportedProgram, table: Mapping[Any, Any]) -> object:
    return take_apart(program, Rules(table, {}))


@pytest.mark.parametrize(
    ("wrong", "called", "dynamic"),
    [
        *((wrong, _gelu, False) for wrong in WRONG),
        *(("dtype", _branches, False), ("rank", _gelu, True), ("size", _gelu, True)),
    ],
)
def test_what_a_rule_gives_wrongly_is_told(
    wrong: str, called: Callable[..., Any], dynamic: bool
) -> None:
    rule, told = WRONG[wrong]
    expected = r"expected torch.float32 \[.*, 3\] on cpu"
    program = _exported(called, dynamic=dynamic)
    with pytest.raises(DecomposeError, match=rf"gelu.*the rule .*{told}, {expected}"):
        decompose(program, {ATEN.gelu.default: rule})


@pytest.mark.parametrize("asked", [explain, _parts])
def test_all_ways_of_asking_tell_it(asked: Any) -> None:
    with pytest.raises(DecomposeError, match="float16"):
        asked(_exported(_gelu), {ATEN.gelu.default: WRONG["dtype"][0]})


@pytest.mark.parametrize("rule", [lambda x, *_: x, lambda *_: None, lambda *_: NotImplemented])
def test_rules_of_composites_are_looked_at_too(rule: Callable[..., Any]) -> None:
    program = _exported(lambda x: torch.nn.functional.linear(x, torch.ones(2, 3)))
    if rule(0) is NotImplemented:
        decompose(program, {ATEN.linear.default: rule})
        return
    with pytest.raises(DecomposeError, match=r"linear"):
        decompose(program, {ATEN.linear.default: rule})


def _fewer(count: int) -> Callable[..., Any]:
    return lambda x, *_, **__: tuple(x.sum(-1).clone() for _ in range(count))


# Where torch takes the results itself, it reads beyond those that there are: no call may reach it.
@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_results_than_the_operator_gives(count: int) -> None:
    program = _exported(lambda x: ATEN.var_mean.correction(x, [-1]))
    for way in (decompose, explain, _parts):
        with pytest.raises(DecomposeError, match=r"var_mean.correction.*the rule .* gives \("):
            way(program, {ATEN.var_mean.correction: _fewer(count)})


@pytest.mark.parametrize("given", [None, 1, torch.ones(4)])
def test_one_result_where_the_operator_gives_several(given: Any) -> None:
    program = _exported(lambda x: ATEN.var_mean.correction(x, [-1]))
    with pytest.raises(DecomposeError, match=r"the rule .* gives .*, expected 2 results"):
        decompose(program, {ATEN.var_mean.correction: lambda *_, **__: given})


def test_fewer_results_of_a_composite_operator() -> None:
    program = _exported(lambda x: ATEN.linalg_slogdet.default(x[:3]))
    with pytest.raises(DecomposeError, match=r"slogdet.*expected 2 results"):
        decompose(program, {ATEN.linalg_slogdet.default: _fewer(1)})


def _turned(x: torch.Tensor) -> Any:
    # What changes the shape of its argument goes torch's way, and with it the whole program.
    made = x * 1
    made.t_()
    return ATEN.var_mean.correction(made, [-1])


def test_fewer_results_in_another_rule_or_a_program_that_goes_torchs_way() -> None:
    few: dict[Any, Any] = {ATEN.var_mean.correction: _fewer(1)}
    within: dict[Any, Any] = {
        ATEN.gelu.default: lambda x, **_: ATEN.var_mean.correction(x, [-1])[0][:, None] + x
    }
    for program, table in ((_exported(_gelu), within), (_exported(_turned), {})):
        for asked in (decompose, _parts):
            with pytest.raises(DecomposeError, match="expected 2 results"):
                asked(program, {**few, **table})


def test_other_strides_and_a_view_are_no_fault() -> None:
    def rule(x: torch.Tensor, **_: Any) -> torch.Tensor:
        return ATEN.relu.default(x.t().contiguous()).t()  # type: ignore[no-any-return]

    program = _exported(_gelu)
    found = decompose(program, {ATEN.gelu.default: rule}).module()(x := torch.rand(4, 3) - 0.5)
    assert torch.equal(found, x.relu())


def test_what_a_call_became_in_a_cache_was_looked_at() -> None:
    cache = DecompositionCache()
    table: dict[Any, Any] = {ATEN.gelu.default: WRONG["dtype"][0]}
    for _ in range(2):
        with pytest.raises(DecomposeError, match=r"float16"):
            decompose(_exported(_gelu), table, cache=cache)


def test_torchs_own_rules_go_by_settings_of_now() -> None:
    program = _exported(lambda x: x + torch.linspace(0, 1, 3))
    torch.set_default_dtype(torch.float64)
    try:
        made = decompose(program, default_decompositions())
    finally:
        torch.set_default_dtype(torch.float32)
    assert made.graph.output_node().args[0][0].meta["val"].dtype is torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_rule_may_give_what_the_kernel_gives_where_torchs_fake_tensors_err(
    dtype: torch.dtype,
) -> None:
    from torch.ao.quantization.fx import _decomposed  # noqa: F401 - registers operators

    choose = torch.ops.quantized_decomposed.choose_qparams_per_token.default

    def rule(x: torch.Tensor, _: torch.dtype) -> Any:
        largest = x.abs().amax(-1, keepdim=True)
        scale = largest.float() if dtype is torch.float16 else largest
        return scale.clamp(min=1e-5) / 127, torch.zeros_like(scale)

    x = torch.rand(4, 3, dtype=dtype)
    program = exported(Of(lambda x: choose(x, torch.int8)), x)
    told = [node.meta["val"] for node in program.graph.nodes if node.target is choose]
    expected = choose(x, torch.int8)
    assert [one.dtype for one in expected] != [one.dtype for one in told[0]]
    found = decompose(program, {choose: rule}).module()(x)
    torch.testing.assert_close(found, expected)
    with pytest.raises(DecomposeError, match=r"float64 \[4, 1\]"):
        decompose(program, {choose: lambda x, _: (x[:1], x[:1])})
