"""One call, or several, of each operator that OpenVINO takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

aten = torch.ops.aten


class Case(NamedTuple):
    """A call of one operator."""

    operator: str
    function: Callable[..., Any]
    inputs: tuple[Any, ...]

    def __str__(self) -> str:
        """Return the operator's name, for the test's."""
        return self.operator


class Calls(torch.nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        """Call it."""
        return self.function(*inputs)


def numbers(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return the same numbers for the same sizes, on both sides of zero."""
    made = torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes) + seed))
    return (made * 3).to(dtype)


def _overload(operator: str) -> Any:
    namespace, name, overload = operator.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _called(operator: str, *inputs: Any, **keywords: Any) -> Case:
    """Call an operator on tensors that are given, and numbers that are not."""
    overload = _overload(operator)
    tensors = tuple(one for one in inputs if isinstance(one, torch.Tensor))
    writes = operator.split(".")[1].endswith("_")

    def function(*given: torch.Tensor) -> Any:
        waiting = iter(given)
        arguments = [next(waiting) if isinstance(x, torch.Tensor) else x for x in inputs]
        if writes:  # what is the program's own is not written
            arguments[0] = arguments[0].clone()
        return overload(*arguments, **keywords)

    return Case(operator, function, tensors)


def _unary() -> list[Case]:
    inside = ("acos", "asin", "atanh")
    above = ("log", "sqrt", "rsqrt", "acosh")
    found = []
    for name in (
        *("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf"),
        *("exp", "floor", "hardsigmoid", "hardswish", "log", "mish", "neg", "relu", "relu6"),
        *("round", "sigmoid", "sign", "silu", "sin", "sinh", "sqrt", "square", "tan", "tanh"),
        *("elu", "selu", "gelu", "softplus", "log_sigmoid", "reciprocal", "rsqrt", "leaky_relu"),
    ):
        value = numbers(3, 5)
        if name in inside:
            value = value.tanh()
        if name in above:
            value = value.abs() + 1.5
        for form in (name, f"{name}_"):
            operator = f"aten.{form}.default"
            if form in dir(torch.ops.aten) or hasattr(torch.ops.aten, form):
                found.append(_called(operator, value))
    return found


def _arithmetic() -> list[Case]:
    x, y, row = numbers(3, 5), numbers(3, 5, seed=1), numbers(5)
    whole = numbers(3, 5, dtype=torch.int32)
    found = [
        _called("aten.add.Tensor", x, row, alpha=2),
        _called("aten.sub.Tensor", x, row, alpha=0.5),
        _called("aten.add.Scalar", x, 2, 3),
        _called("aten.sub.Scalar", x, 1.5),
        _called("aten.add_.Tensor", x, y),
        _called("aten.sub_.Tensor", x, y),
        _called("aten.add_.Scalar", x, 2),
        _called("aten.sub_.Scalar", x, 2),
        _called("aten.mul.Tensor", x, row),
        _called("aten.mul.Scalar", x, -2),
        _called("aten.mul_.Tensor", x, y),
        _called("aten.mul_.Scalar", x, 3),
        _called("aten.div.Tensor", x, row),
        _called("aten.div.Scalar", x, 3),
        _called("aten.div_.Tensor", x, y),
        _called("aten.div_.Scalar", x, 3),
        _called("aten.maximum.default", x, row),
        _called("aten.minimum.default", x, row),
        _called("aten.add.Tensor", whole, whole),
        _called("aten.mul.Tensor", whole, whole),
        _called("aten.rsub.Scalar", x, 2, 3),
        _called("aten.pow.Tensor_Scalar", x, 2),
        _called("aten.pow.Tensor_Scalar", x, 3),
        _called("aten.pow.Tensor_Scalar", x.abs(), 0.5),
        _called("aten.pow.Tensor_Tensor", x.abs(), y),
        _called("aten.clamp.default", x, -1.0, 2.0),
        _called("aten.clamp.default", x, None, 0.5),
        _called("aten.clamp.default", x, 2.0, 1.0),
        _called("aten.clamp_.default", x, 0.0),
        _called("aten.clamp_min.default", x, 0.5),
        _called("aten.clamp_max.default", x, 0.5),
        _called("aten.clamp_min_.default", x, 0.5),
        _called("aten.clamp_max_.default", x, 0.5),
        _called("aten.where.ScalarSelf", x > 0, 2.5, x),
        _called("aten.where.ScalarOther", x > 0, x, -1),
        _called("aten.addcmul.default", row, x, y, value=0.5),
        _called("aten.hardtanh.default", x, -0.5, 0.75),
        _called("aten.hardtanh_.default", x),
        _called("aten.prelu.default", numbers(2, 4, 3), numbers(4)),
        _called("aten.gelu.default", x, approximate="tanh"),
        _called("aten.leaky_relu.default", x, 0.3),
        _called("aten.elu.default", x, 0.7),
        _called("aten.where.self", x > 0, x, row),
        _called("aten.masked_fill.Scalar", x, y > 0, -7.5),
        _called("aten.logical_not.default", x > 0),
        Case(
            "aten._assert_tensor_metadata.default",
            lambda t: (aten._assert_tensor_metadata(t, None, None, t.dtype), t + 1)[1],
            (x,),
        ),
        *(_called(f"aten.logical_{name}.default", x > 0, y > 0) for name in ("and", "or", "xor")),
    ]
    strange = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0]).repeat(6, 1)
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        found.append(_called(f"aten.{name}.Tensor", x.round(), y.round()))
        found.append(_called(f"aten.{name}.Tensor", whole, x.round()))
        found.append(_called(f"aten.{name}.Tensor", strange, strange.T.contiguous()))
        found.append(_called(f"aten.{name}.Scalar", x.round(), 1))
        found.append(_called(f"aten.{name}.Scalar", whole, 0.5))
    return found


def _matrices() -> list[Case]:
    q, k, v = (numbers(2, 3, 7, 8, seed=seed) for seed in range(3))
    attention = "aten.scaled_dot_product_attention.default"
    return [
        _called("aten.linear.default", numbers(2, 3, 8), numbers(4, 8), numbers(4)),
        _called("aten.linear.default", numbers(3, 8), numbers(4, 8)),
        _called("aten.linear.default", numbers(8), numbers(4, 8)),
        _called("aten.matmul.default", numbers(2, 3, 4), numbers(4, 5)),
        _called("aten.matmul.default", numbers(3, 4), numbers(4)),
        _called("aten.matmul.default", numbers(4), numbers(2, 4, 5)),
        _called("aten.mm.default", numbers(3, 4), numbers(4, 5)),
        _called("aten.mv.default", numbers(3, 4), numbers(4)),
        _called("aten.bmm.default", numbers(2, 3, 4), numbers(2, 4, 5)),
        _called("aten.addmm.default", numbers(5), numbers(3, 4), numbers(4, 5)),
        _called("aten.addmm.default", numbers(5), numbers(3, 4), numbers(4, 5), beta=2, alpha=0.5),
        _called("aten.addmm.default", numbers(5) / 0, numbers(3, 4), numbers(4, 5), beta=0),
        _called("aten.baddbmm.default", numbers(2, 3, 5), numbers(2, 3, 4), numbers(2, 4, 5)),
        _called(attention, q, k, v),
        _called(attention, q, k, v, is_causal=True),
        _called(attention, q, k, v, scale=0.25),
        _called(attention, q, k, v, numbers(7, 7)),
        _called(attention, q, k, v, numbers(7, 7).abs() > 1),
        *(_called(attention, q, k, v, mask) for mask in _masks()),
    ]


def _masks() -> list[torch.Tensor]:
    """Return masks of 7 x 7 whose rows leave all, some or nothing, each by the usual numbers."""
    causal = torch.ones(7, 7).triu(1).bool()
    rows = (torch.arange(7) % 3 != 0)[:, None] & causal | (torch.arange(7) == 3)[:, None]
    least = torch.finfo(torch.float32).min
    fillings = (-1e4, -1e9, -1e30, -1.7e38, -1.8e38, least, -torch.inf)
    # float16's own, which remain what they are in the test of halves.
    masks = [torch.zeros(7, 7).masked_fill(rows, x) for x in (*fillings, -32752.0, -65504.0)]
    mixed = torch.zeros(7, 7)
    mixed[0], mixed[1], mixed[2] = least, -torch.inf, least
    mixed[2, ::2], mixed[3], mixed[3, 2], mixed[4] = -torch.inf, -1e38, -2e38, -2e38
    mixed[4, 5], mixed[5], mixed[5, 0], mixed[6] = -1e38, -torch.inf, -3e38, -65504.0
    mixed[6, 3] = -torch.inf
    return [*masks, mixed, mixed.expand(2, 1, 7, 7).contiguous()]


def _movement() -> list[Case]:
    x, image = numbers(2, 3, 4), numbers(2, 3, 4, 6)
    rows, places = torch.tensor([2, 0, 1, 2]), torch.tensor([[0, 1], [2, 1]])
    return [
        _called("aten.view.default", x, [6, -1]),
        _called("aten.reshape.default", x, [4, 6]),
        _called("aten._unsafe_view.default", x, [24]),
        _called("aten.flatten.using_ints", x, 1),
        _called("aten.unflatten.int", x, 2, [2, 2]),
        _called("aten.reshape_as.default", x, numbers(4, 6)),
        _called("aten.view_as.default", x, numbers(4, 6)),
        _called("aten.expand_as.default", numbers(3, 1), x),
        _called("aten.to.dtype_layout", x, dtype=torch.float16, layout=torch.strided),
        _called("aten.to.device", x, torch.device("cpu"), torch.float16),
        _called("aten.to.other", x, numbers(1, dtype=torch.float16)),
        _called("aten.unsqueeze.default", x, -1),
        _called("aten.squeeze.default", numbers(1, 3, 1)),
        _called("aten.squeeze.dim", numbers(1, 3, 1), 0),
        _called("aten.squeeze.dims", numbers(1, 3, 1), [0, 2]),
        _called("aten.alias.default", x),
        _called("aten.clone.default", x),
        _called("aten.contiguous.default", x),
        _called("aten.detach.default", x),
        _called("aten.lift_fresh_copy.default", x),
        _called("aten.dropout.default", x, 0.5, False),
        _called("aten.to.dtype", x, torch.float16),
        _called("aten.to.dtype", x, torch.int32),
        _called("aten.to.dtype", x.round(), torch.bool),
        _called("aten.to.dtype", x > 0, torch.float32),
        _called("aten._to_copy.default", x, dtype=torch.float16),
        Case("aten.to.dtype", lambda t: t.to(torch.float16).to(torch.float32), (x * 100,)),
        _called("aten.type_as.default", x, numbers(1, dtype=torch.float16)),
        _called("aten.permute.default", x, [2, 0, -2]),
        _called("aten.transpose.int", x, 0, -1),
        _called("aten.t.default", numbers(3, 4)),
        _called("aten.numpy_T.default", numbers(3, 4)),
        _called("aten.mT.default", x),
        Case("aten.split.Tensor", lambda t: tuple(aten.split.Tensor(t, 3, 2)), (x,)),
        Case("aten.split.sizes", lambda t: tuple(aten.split.sizes(t, [1, 3], 2)), (x,)),
        Case(
            "aten.split_with_sizes.default",
            lambda t: tuple(aten.split_with_sizes.default(t, [1, 3], -1)),
            (x,),
        ),
        Case("aten.chunk.default", lambda t: tuple(aten.chunk.default(t, 2, 2)), (x,)),
        Case("aten.unbind.int", lambda t: tuple(aten.unbind.int(t, 1)), (x,)),
        Case("aten.unbind.int", lambda t: aten.unbind.int(t, 1)[1], (x,)),
        Case("aten.cat.default", lambda a, b: aten.cat.default([a, b, a], -1), (x, x + 1)),
        Case("aten.cat.default", lambda a, b: aten.cat.default([a, b], 1), (x, torch.ones(0))),
        Case("aten.stack.default", lambda a, b: aten.stack.default([a, b], -1), (x, x + 1)),
        _called("aten.expand.default", numbers(1, 3, 1), [2, 2, -1, 4]),
        _called("aten.repeat.default", x, [2, 1, 1, 3]),
        _called("aten.slice.Tensor", x, 2, 1, -1),
        _called("aten.slice.Tensor", x, 2, -3, torch.iinfo(torch.int64).max, 2),
        _called("aten.slice.Tensor", x, 0, None, 1),
        _called("aten.narrow.default", x, 2, 1, 2),
        _called("aten.narrow.default", x, 2, -2, 2),
        _called("aten.select.int", x, 1, -1),
        _called("aten.flip.default", x, [0, 2]),
        _called("aten.roll.default", x, [1, -2], [0, 2]),
        _called("aten.embedding.default", numbers(3, 5), places),
        _called("aten.index_select.default", x, 1, rows),
        _called("aten.gather.default", numbers(3, 2), 0, places),
        Case("aten.index.Tensor", lambda t, at: t[:, at], (x, rows)),
        Case("aten.index.Tensor", lambda t, at: t[at], (numbers(3, 2), places - 2)),
        Case("aten.index.Tensor", lambda t, at: t[..., at], (x, places.int())),
        _called("aten.pixel_shuffle.default", numbers(2, 8, 3, 5), 2),
        _called("aten.pixel_unshuffle.default", image, 2),
    ]


def _reductions() -> list[Case]:
    x = numbers(2, 3, 4)
    found = [
        _called("aten.amax.default", x, [1]),
        _called("aten.amin.default", x, [0, 2]),
        _called("aten.mean.dim", x, [1], True),
        _called("aten.sum.dim_IntList", x, [-1, 0]),
        _called("aten.sum.dim_IntList", x, None, True),
        _called("aten.prod.dim_int", x, 1),
        _called("aten.any.dim", x > 2, 1),
        _called("aten.all.dim", x > -2, 1, True),
        _called("aten.softmax.int", x, -1),
        _called("aten.softmax.int", x.half(), -1, torch.float32),
        _called("aten._softmax.default", x, 1, False),
        _called("aten.log_softmax.int", x, 0),
        _called("aten._log_softmax.default", x, -1, False),
        _called("aten.linalg_vector_norm.default", x, 2, [1]),
        _called("aten.linalg_vector_norm.default", x, 1, None, True),
        _called("aten.cumsum.default", x, 1),
    ]
    for name in ("var", "std"):
        found.append(_called(f"aten.{name}.correction", x, [1], correction=0))
        found.append(_called(f"aten.{name}.correction", x, None, keepdim=True))
        found.append(_called(f"aten.{name}.dim", x, [1, 2], False, True))
    return found


def _norms() -> list[Case]:
    image = numbers(2, 4, 5, 3)
    scale, shift, mean, spread = (numbers(4, seed=seed) for seed in range(4))
    eval_norm = "aten._native_batch_norm_legit_no_training.default"
    return [
        _called(
            "aten.batch_norm.default",
            *(image, scale, shift, mean, spread.abs(), False, 0.1, 1e-5, True),
        ),
        Case(
            "aten.batch_norm.default",
            lambda *t: aten.batch_norm.default(t[0], None, None, *t[1:], False, 0.1, 1e-3, True),
            (image, mean, spread.abs()),
        ),
        Case(
            eval_norm,
            lambda *t: aten._native_batch_norm_legit_no_training.default(*t, 0.1, 1e-5)[0],
            (image, scale, shift, mean, spread.abs()),
        ),
        _called("aten.layer_norm.default", image, [5, 3], numbers(5, 3), numbers(5, 3)),
        _called("aten.layer_norm.default", image, [3]),
        Case(
            "aten.native_layer_norm.default",
            lambda t, w: aten.native_layer_norm.default(t, [3], w, None, 1e-5)[0],
            (image, numbers(3)),
        ),
        _called("aten.group_norm.default", image, 2, scale, shift),
        _called("aten.group_norm.default", image, 4),
        Case(
            "aten.native_group_norm.default",
            lambda t, w, b: aten.native_group_norm.default(t, w, b, 2, 4, 15, 2, 1e-5)[0],
            (image, scale, shift),
        ),
        _called("aten.rms_norm.default", image, [3], numbers(3)),
        _called("aten.rms_norm.default", image, [5, 3], None, 1e-3),
        _called("aten._weight_norm.default", image, numbers(2, 1, 1, 1)),
        _called("aten._weight_norm.default", image, numbers(1, 1, 1, 3), 3),
        _called("aten._weight_norm.default", image, numbers(1, 1, 1, 1), -1),
        _called("aten._weight_norm.default", image, numbers(1, 1, 5, 1), -2),
        _called("aten._weight_norm.default", image, numbers(1, 4, 1, 1), -3),
        _called("aten._weight_norm.default", image, numbers(2, 1, 1, 1), -4),
    ]


def _windows() -> list[Case]:
    line, image, volume = numbers(2, 4, 9), numbers(2, 4, 9, 8), numbers(1, 4, 5, 6, 7)
    found = []
    for rank, value in ((1, line), (2, image), (3, volume)):
        kernel = [3, 2, 3][:rank]
        weight = numbers(6, 4, *kernel)
        grouped = numbers(8, 1, *kernel)
        found += [
            _called(
                f"aten.conv{rank}d.default", value, weight, numbers(6), [2] * rank, [1] * rank
            ),
            _called(f"aten.conv{rank}d.default", value, weight, None, [1], [0], [2] * rank),
            _called(f"aten.conv{rank}d.default", value, grouped, None, [1], [1], [1], 4),
            _called(f"aten.conv{rank}d.padding", value, weight, numbers(6), [1], "same"),
            _called(f"aten.conv{rank}d.padding", value, weight, None, [1], "valid"),
        ]
        transposed = f"aten.conv_transpose{rank}d.{'default' if rank == 1 else 'input'}"
        across = numbers(4, 3, *kernel)
        more = [2] * rank
        found += [
            _called(transposed, value, across, numbers(3), more, [1] * rank, [1] * rank),
            _called(transposed, value, across, numbers(6), more, [1] * rank, [0] * rank, 2),
            _called(
                "aten.convolution.default",
                *(value, weight, numbers(6), [1] * rank, [1] * rank, [1] * rank),
                *(False, [0] * rank, 1),
            ),
            _called(
                "aten.convolution.default",
                *(value, across, None, more, [0] * rank, [1] * rank, True, [1] * rank, 2),
            ),
            _called(f"aten.avg_pool{rank}d.default", value, [3] * rank, [2] * rank, [1] * rank),
            _called(
                f"aten.avg_pool{rank}d.default",
                *(value, [3] * rank, [2] * rank, [1] * rank, False, False),
            ),
            _called(f"aten.max_pool{rank}d.default", value, [3] * rank, [2] * rank, [1] * rank),
            _called(f"aten.max_pool{rank}d.default", value, [2] * rank),
            _called(
                f"aten.max_pool{rank}d.default",
                *(value, [3] * rank, [2] * rank, [1] * rank, [1] * rank, True),
            ),
            _called(
                f"aten.avg_pool{rank}d.default", value, [2] * rank, [3] * rank, [1] * rank, True
            ),
            _called(f"aten.adaptive_avg_pool{rank}d.default", value, [2] * rank),
        ]
    nearest, linear = "aten.upsample_nearest2d.vec", "aten.upsample_bilinear2d.vec"
    return [
        *found,
        _called("aten._adaptive_avg_pool2d.default", image, [1, 1]),
        Case(
            "aten.max_pool2d_with_indices.default",
            lambda t: aten.max_pool2d_with_indices.default(t, [3, 3], [2, 2], [1, 1], [1, 2])[0],
            (image,),
        ),
        _called("aten.constant_pad_nd.default", image, [1, 2, -1, 0], 2.5),
        _called("aten.pad.default", image, [1, 2, 0, 3]),
        _called("aten.pad.default", image, [1, 2, 0, 3], "reflect"),
        _called("aten.pad.default", image, [1, 2, 0, 3], "replicate"),
        _called("aten.reflection_pad2d.default", image, [1, 2, 0, 3]),
        _called("aten.replication_pad2d.default", image, [1, 2, 0, 3]),
        _called(nearest, image, [18, 16], None),
        _called(nearest, image, [5, 11], None),
        _called(nearest, image, None, [2.0, 3.0]),
        _called(linear, image, [18, 13], False, None),
        _called(linear, image, [18, 13], True, None),
        _called(linear, image, None, False, [2.0, 3.0]),
    ]


def _quantized() -> list[Case]:
    import torch.ao.quantization.fx._decomposed

    ops = torch.ops.quantized_decomposed
    x, weight = numbers(3, 4), numbers(4, 3)
    scales, zeros = torch.tensor([0.02, 0.5, 0.1]), torch.tensor([0, 3, -2])
    bytes_ = (-128, 127, torch.int8)
    return [
        _called("quantized_decomposed.quantize_per_tensor.default", x, 0.05, 3, *bytes_),
        _called(
            "quantized_decomposed.quantize_per_tensor.default", x, 0.05, 100, 0, 255, torch.uint8
        ),
        Case(
            "quantized_decomposed.dequantize_per_tensor.default",
            lambda t: ops.dequantize_per_tensor(
                ops.quantize_per_tensor(t, 0.05, 3, *bytes_), 0.05, 3, *bytes_
            ),
            (x,),
        ),
        _called(
            "quantized_decomposed.dequantize_per_tensor.default",
            *(x.to(torch.int8), 0.05, 3, *bytes_),
        ),
        _called(
            "quantized_decomposed.quantize_per_channel.default",
            *(weight, scales, zeros, 1, *bytes_),
        ),
        _called(
            "quantized_decomposed.dequantize_per_channel.default",
            *(weight.to(torch.int8), scales, zeros, 1, *bytes_),
        ),
    ]


CASES = [
    *_unary(),
    *_arithmetic(),
    *_matrices(),
    *_movement(),
    *_reductions(),
    *_norms(),
    *_windows(),
    *_quantized(),
]
