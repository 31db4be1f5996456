"""Every fast function runs the very operator that it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowerdeck.unflatten.code.bindings import FAST, KEYWORDS, METHODS, callable_for

X = torch.rand(2, 4) / 2 + 0.25
IMAGE = torch.rand(1, 2, 5, 5)

# Arguments for the operators that take more than one or two tensors.
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "linear": (X, torch.rand(3, 4), torch.rand(3)),
    "scaled_dot_product_attention": (torch.rand(1, 2, 3, 4),) * 3,
    "view": (X, [4, 2]),
    "expand": (X, [3, 2, 4]),
    "sym_size.int": (X, 1),
    "matmul": (X, X.t()),
    "mm": (X, X.t()),
    "bmm": (X[None], X.t()[None]),
    "addmm": (torch.rand(2), X, X.t()),
    "layer_norm": (X, [4], torch.ones(4), torch.zeros(4), 1e-5, True),
    "group_norm": (X, 2, torch.ones(4), torch.zeros(4), 1e-5, True),
    "rms_norm": (X, [4], torch.ones(4)),
    "embedding": (X, torch.tensor([1, 0])),
    "dropout": (X, 0.5, False),
    "batch_norm": (X, None, None, torch.zeros(4), torch.ones(4), False, 0.1, 1e-5, False),
    "transpose.int": (X, 0, 1),
    "permute": (X, [1, 0]),
    "reshape": (X, [8]),
    "unsqueeze": (X, 0),
    "squeeze.dim": (X[None], 0),
    "cat": ([X, X], 1),
    "stack": ([X, X], 0),
    "flatten.using_ints": (X, 0, 1),
    "select.int": (X, 0, 1),
    "narrow": (X, 1, 0, 2),
    "chunk": (X, 2, 1),
    "split_with_sizes": (X, [1, 3], 1),
    "where.self": (X > 0.5, X, X + 1),
    "softmax.int": (X, 1),
    "log_softmax.int": (X, 1),
    "mean.dim": (X, [1], True),
    "sum.dim_IntList": (X, [1], True),
    "index_select": (X, 1, torch.tensor([0])),
    "gather": (X, 1, torch.tensor([[0], [1]])),
    "cumsum": (X, 1),
    "conv1d": (IMAGE[0], torch.rand(3, 5, 2), None, [1], [0], [1], 1),
    "conv2d": (IMAGE, torch.rand(3, 2, 2, 2), torch.rand(3), [1, 1], [1, 1], [1, 1], 1),
    "conv3d": (IMAGE, torch.rand(3, 1, 1, 2, 2), None, [1, 1, 1], [0, 0, 0], [1, 1, 1], 1),
    "repeat_interleave.self_int": (X, 2, 1),
    "masked_fill.Scalar": (X, X > 0.5, 0.0),
    "masked_fill.Tensor": (X, X > 0.5, torch.zeros(())),
    "tril": (X,),
    "triu": (X, 1),
}


def _arguments(target: Any) -> tuple[Any, ...]:
    name = target._opname + (
        "" if target._overloadname == "default" else f".{target._overloadname}"
    )
    if name in _ARGUMENTS:
        return _ARGUMENTS[name]
    count = sum(not argument.has_default_value() for argument in target._schema.arguments)
    second = 0.5 if target._overloadname == "Scalar" else X.flip(0)
    return (X, second)[:count]


@pytest.mark.parametrize("target", FAST, ids=str)
def test_function_runs_its_operator(target: Any) -> None:
    arguments = _arguments(target)
    traced: list[list[Any]] = []
    for function in (target, FAST[target]):
        torch.manual_seed(0)

        class Holder(torch.nn.Module):
            def forward(self, *tensors: Tensor, function: Any = function) -> Any:
                feed = iter(tensors)
                return function(*_replaced(arguments, feed))

        tensors = tuple(_tensors(arguments))
        program = torch.export.export(Holder(), tensors)
        calls = [node for node in program.graph.nodes if node.op == "call_function"]
        traced.append([(node.target, str(node.args), str(node.kwargs)) for node in calls])
    assert traced[0] == traced[1]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _replaced(value: Any, feed: Any) -> Any:
    if isinstance(value, Tensor):
        return next(feed)
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, feed) for item in value)
    return value


def test_unknown_operators_and_keywords_keep_their_overload() -> None:
    aten = torch.ops.aten
    assert callable_for(aten.sort.default, {}) is aten.sort.default
    assert callable_for(aten.add.Tensor, {"other": X}) is aten.add.Tensor
    assert callable_for(aten.add.Tensor, {"alpha": 2}) is torch.add
    assert "alpha" in KEYWORDS


@pytest.mark.parametrize("target", METHODS, ids=str)
def test_method_runs_its_operator(target: Any) -> None:
    x, *others = _arguments(target)

    class Holder(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return getattr(x, METHODS[target])(*others)

    sizes = ({1: torch.export.Dim("size")},) if target is torch.ops.aten.sym_size.int else None
    program = torch.export.export(Holder(), (x,), dynamic_shapes=sizes)
    (call,) = (node for node in program.graph.nodes if node.op == "call_function")
    assert (call.target, list(call.args[1:]), dict(call.kwargs)) == (target, others, {})
