"""What kernels refuse is rewritten, in place is safe where told, layouts give eager values."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from lowerdeck.emitter import OFFICIAL_KERNELS, EmitConfig, MissingKernelError, emit
from lowerdeck.serializer import KernelCall, Tensor
from lowerdeck_zoo import Of, assert_close, official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

F32, F64, I64, I32 = torch.float32, torch.float64, torch.int64, torch.int32


def emitted_of(function: Any, args: tuple[Any, ...], **options: Any) -> Any:
    module = function if isinstance(function, nn.Module) else Of(function)
    config = options.pop("config", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return emit(torch.export.export(module.eval(), args, **options), config=config)


def run(emitted: Any, args: tuple[Any, ...], **options: Any) -> list[Any]:
    outcome = official.run(emitted.to_bytes(), [official.Call(args)], **options)
    assert isinstance(outcome, official.Ran), outcome
    return outcome.outputs[0]


def check(function: Any, *args: Any, **options: Any) -> Any:
    emitted = emitted_of(function, args, **options)
    with torch.no_grad():
        expected = pytree.tree_leaves(function(*copy.deepcopy(args)))
    assert_close(run(emitted, args), expected, atol=1e-4, rtol=1e-4)
    return emitted


def kernels(emitted: Any) -> list[str]:
    plan = emitted.program.execution_plan[0]
    steps = [i.instr_args for i in plan.chains[0].instructions]
    return [plan.operators[s.op_index].full_name for s in steps if isinstance(s, KernelCall)]


# What eager reads by strides into the memory of another tensor is not there in a program.
STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of a column": lambda x: (x * 2)[:, 0].as_strided((2, 2), (1, 2)),
    "of a column, copied": lambda x: torch.as_strided_copy((x * 2)[:, 0], (2, 2), (1, 2)),
    "of a turned tensor": lambda x: torch.as_strided_copy((x * 2).mT, (2, 2), (1, 2)),
    "before a row": lambda x: (x * 2)[1].as_strided((2, 2), (1, 2), 0),
    "past a row": lambda x: (x * 2)[0].as_strided((2, 3), (3, 2)),
}


@pytest.mark.parametrize("name", STRIDES)
def test_strides_into_memory_that_a_program_does_not_have_are_refused(name: str) -> None:
    with pytest.raises(MissingKernelError, match=r"as_strided.*(slices or an index|reads past)"):
        emitted_of(STRIDES[name], (torch.randn(4, 4),))


def test_strides_into_a_whole_tensor_are_right() -> None:
    check(lambda x: (x * 2).as_strided((2, 3), (1, 4), 2), torch.randn(4, 4))


INTS = torch.tensor([-7, -3, 3, 7, 8, -8])
QUIRKS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "integer tensor plus floating number": (lambda x: x + 0.5, (INTS,)),
    "integer tensor minus floating number": (lambda x: x - 0.5, (INTS,)),
    "remainder of negative integers": (torch.remainder, (INTS, torch.full((6,), 3))),
    "remainder by a number": (lambda x: x % 3, (INTS,)),
    "sum of a single number": (lambda x: x.sum(), (torch.tensor(2.0),)),
    "sum of a single integer as float": (lambda x: x.sum(dtype=F32), (torch.tensor(2),)),
    "running sum of a single number": (lambda x: x.cumsum(0), (torch.tensor(2.0),)),
    "log_softmax in float64": (lambda x: x.log_softmax(-1), (torch.randn(3, 4, dtype=F64),)),
    "narrow_copy from a negative start": (
        lambda x: x.narrow_copy(-1, -2, 2),
        (torch.randn(3, 4),),
    ),
    "gather with narrow indices": (
        lambda x, i: torch.index_select(x, 0, i),
        (torch.randn(5, 2), torch.tensor([3, 1], dtype=I32)),
    ),
    "padding that cuts": (
        lambda x: torch.nn.functional.pad(x, (-1, 2, 1, -1)),
        (torch.randn(4, 5),),
    ),
    "a product over nothing": (torch.mm, (torch.ones(2, 0), torch.ones(0, 3))),
    "a batch of products over nothing": (torch.bmm, (torch.ones(2, 2, 0), torch.ones(2, 0, 3))),
    "sort": (torch.sort, (torch.randn(3, 7),)),
    "argsort, descending": (lambda x: x.argsort(descending=True), (torch.randn(7),)),
    "msort": (torch.msort, (torch.randn(5, 3),)),
    "linear of a vector": (
        torch.nn.functional.linear,
        (torch.randn(3), torch.randn(2, 3), torch.randn(2)),
    ),
    "masked_select that broadcasts": (
        torch.masked_select,
        (torch.randn(5), torch.randn(4, 5) > 0),
    ),
    "nonzero": (torch.nonzero, (torch.tensor([[0.0, 1.0], [2.0, 0.0]]),)),
    "a copy that need not block": (lambda x: x.to(F64, non_blocking=True), (torch.randn(3),)),
    "the window of a single number": (lambda x: x.unfold(0, 1, 1), (torch.tensor(2.0),)),
    "a shift by an operator": (lambda x: (x << 2) + (x >> 1), (INTS.abs(),)),
    "the number in a narrow tensor": (
        lambda x, y: x.sum() * y.sum().item(),
        (torch.ones(2), torch.ones(3).half()),
    ),
    "logit in a narrow type": (
        lambda x: torch.logit(x).float().round(decimals=1),
        (torch.tensor([0.25, 0.5]).half(),),
    ),
    "vector norm": (lambda x: torch.linalg.vector_norm(x, dim=-1), (torch.randn(3, 4),)),
    "layer norm": (lambda x: torch.nn.functional.layer_norm(x, (4,)), (torch.randn(3, 4),)),
    "a number made of a tensor": (
        lambda x, y: torch.maximum(x, torch.tensor(0.5)) + y.to(I64),
        (torch.randn(4), torch.randn(4)),
    ),
}


@pytest.mark.parametrize("name", QUIRKS)
def test_a_quirk_is_cured(name: str) -> None:
    function, args = QUIRKS[name]
    check(function, *args)


def test_attention_guards_only_rows_that_a_mask_may_hide() -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    q = torch.randn(1, 2, 4, 8)
    plain = check(attend, q, q, q)
    assert "aten::any.out" not in kernels(plain)
    causal = check(lambda x: attend(x, x, x, is_causal=True), q)
    assert "aten::any.out" not in kernels(causal)
    hidden = torch.tensor([[True, False, True, True]] * 3 + [[False] * 4])
    check(lambda x, m: attend(x, x, x, attn_mask=m), q, hidden)
    check(lambda x, m: attend(x, x, x, attn_mask=m), q, torch.randn(4, 4))


def test_several_query_heads_may_share_a_key_head() -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    check(lambda q, k: attend(q, k, k, enable_gqa=True), q, k)


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, _: function(x)


IN_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "relu": _unary(torch.relu),
    "neg": _unary(torch.neg),
    "exp": _unary(torch.exp),
    "sigmoid": _unary(torch.sigmoid),
    "tanh": _unary(torch.tanh),
    "gelu": _unary(torch.nn.functional.gelu),
    "sqrt": _unary(lambda x: torch.sqrt(x.abs())),
    "rsqrt": _unary(lambda x: torch.rsqrt(x.abs() + 1)),
    "clamp": _unary(lambda x: torch.clamp(x, -0.5, 0.5)),
    "hardtanh": _unary(torch.nn.functional.hardtanh),
    "leaky_relu": _unary(torch.nn.functional.leaky_relu),
    "elu": _unary(torch.nn.functional.elu),
    "abs": _unary(torch.abs),
    "sin": _unary(torch.sin),
    "cos": _unary(torch.cos),
    "erf": _unary(torch.erf),
    "log": _unary(lambda x: torch.log(x.abs() + 1)),
    "logical_not": _unary(lambda x: torch.logical_not(x > 0)),
    "pow": _unary(lambda x: x**2),
    "add": torch.add,
    "sub": lambda x, y: y - x,
    "mul": torch.mul,
    "div": lambda x, y: y / (x.abs() + 1),
    "maximum": torch.maximum,
    "minimum": lambda x, y: torch.minimum(y, x),
    "where": lambda x, y: torch.where(y > 0, x, y),
    "_native_batch_norm_legit_no_training": _unary(
        lambda x: torch.nn.functional.batch_norm(x, torch.zeros(8), torch.ones(8) * 2)
    ),
}


def test_every_kernel_that_is_called_safe_is_tried() -> None:
    assert set(IN_PLACE) == OFFICIAL_KERNELS.in_place_safe


@pytest.mark.parametrize("name", sorted(OFFICIAL_KERNELS.in_place_safe))
def test_a_safe_kernel_may_write_where_it_reads(name: str) -> None:
    args = (torch.randn(6, 8), torch.randn(1, 8))
    emitted = check(lambda x, y: IN_PLACE[name](x * 3, y) * 2, *args)
    plan = emitted.program.execution_plan[0]
    steps = [i.instr_args for i in plan.chains[0].instructions]
    step = next(
        s
        for s in steps
        if plan.operators[s.op_index].name == f"aten::{name}" and s is not steps[-1]
    )
    tensors = [plan.values[i].val for i in step.args if isinstance(plan.values[i].val, Tensor)]
    allocations = [
        tensor.allocation_info for tensor in tensors if tensor.allocation_info is not None
    ]
    # The output is there twice, as argument and as return value.
    assert (
        any(allocations.count(one) > 2 for one in allocations)
        or len(set(map(repr, allocations))) == 1
    )


class Scatter(nn.Module):
    def __init__(self, write: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("cache", torch.arange(12.0).view(3, 4))
        self.write = write

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        self.cache.copy_(self.write(self.cache, x, i))
        return self.cache + 1


WRITES = {
    "index_put": lambda c, x, i: torch.index_put(c, (i,), x),
    "slice_scatter": lambda c, x, _: torch.slice_scatter(c, x, 0, 1, 3),
    "select_scatter": lambda c, x, _: torch.select_scatter(c, x[0], 0, 1),
    "scatter": lambda c, x, i: torch.scatter(c, 0, i.view(2, 1).expand(2, 4), x),
    "scatter_add": lambda c, x, i: torch.scatter_add(c, 0, i.view(2, 1).expand(2, 4), x),
    "masked_scatter": lambda c, x, i: torch.masked_scatter(c, c > i.sum() + 3, x.repeat(2, 1)),
}


def test_every_kernel_that_writes_into_its_first_argument_is_tried() -> None:
    assert set(WRITES) == OFFICIAL_KERNELS.writes_into_self


@pytest.mark.parametrize("name", WRITES)
def test_a_buffer_is_written_without_an_extra_copy(name: str) -> None:
    module = Scatter(WRITES[name])
    eager = copy.deepcopy(module)
    calls = [(torch.randn(2, 4), torch.tensor([2, 0])) for _ in range(3)]
    emitted = emitted_of(module, calls[0])
    assert "aten::clone.out" not in kernels(emitted)
    outcome = official.run(emitted.to_bytes(), [official.Call(call) for call in calls])
    assert isinstance(outcome, official.Ran), outcome
    for call, outputs in zip(calls, outcome.outputs, strict=True):
        assert_close(outputs, [eager(*call)])


@pytest.mark.parametrize("config", [EmitConfig(plan_inputs=False), EmitConfig(plan_outputs=False)])
def test_the_caller_may_bring_the_memory(config: EmitConfig) -> None:
    check(lambda x: (x.view(-1) + 1, x.t() @ x), torch.randn(3, 4), config=config)
