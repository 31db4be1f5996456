"""One call, or several, of each operator that OpenVINO takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.ao.quantization.fx._decomposed  # makes the quantised operators known

aten = torch.ops.aten


class Case(NamedTuple):
    """A call of one operator."""

    operator: str
    function: Callable[..., Any]
    inputs: tuple[Any, ...]

    def __str__(self) -> str:
        """Return the operator's name, for the test's."""
        return self.operator


def numbers(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return the same numbers for the same sizes, on both sides of zero."""
    made = torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes) + seed))
    return (made * 3).to(dtype)


def calls(operators: str, *inputs: Any, pick: Any = lambda y: y, **keywords: Any) -> list[Case]:
    """Return a call of each of some operators, on tensors that are given and numbers that are not.

    Args:
        operators: Names of aten's operators, separated by blanks, with overloads where they are
            not the default; names with another namespace have that, too.
        inputs: The arguments. Tensors in lists count, too.
        pick: What is returned of the result.
        keywords: The arguments by name.
    """
    tensors, spec = torch.utils._pytree.tree_flatten(list(inputs))
    given = tuple(one for one in tensors if isinstance(one, torch.Tensor))

    def case(name: str) -> Case:
        namespace, name = name.split("::") if "::" in name else ("aten", name)
        name, overload = name.split(".") if "." in name else (name, "default")
        target = getattr(getattr(getattr(torch.ops, namespace), name), overload)

        def function(*values: torch.Tensor) -> Any:
            waiting = iter(values)
            flat = [next(waiting) if isinstance(x, torch.Tensor) else x for x in tensors]
            arguments = torch.utils._pytree.tree_unflatten(flat, spec)
            if name.endswith("_"):  # what is the program's own is not written
                arguments[0] = arguments[0].clone()
            result = pick(target(*arguments, **keywords))
            return tuple(result) if isinstance(result, list) else result

        return Case(f"{namespace}.{name}.{overload}", function, given)

    return [case(name) for name in operators.split()]


def _unary() -> Iterator[Case]:
    x = numbers(3, 5)
    for value, names in (
        (x, "abs asinh atan ceil cos cosh erf exp floor hardsigmoid hardswish mish neg relu"),
        (x, "relu6 round sigmoid sign silu sin sinh square tan tanh elu selu gelu softplus"),
        (x, "log_sigmoid reciprocal leaky_relu"),
        (x.tanh(), "acos asin atanh"),
        (x.abs() + 1.5, "log sqrt rsqrt acosh"),
    ):
        forms = [form for name in names.split() for form in (name, f"{name}_")]
        yield from calls(" ".join(form for form in forms if hasattr(aten, form)), value)
    yield from calls("hardtanh_", x)
    yield from calls("hardtanh", x, -0.5, 0.75)
    yield from calls("gelu", x, approximate="tanh")
    yield from calls("leaky_relu", x, 0.3)
    yield from calls("elu", x, 0.7)
    yield from calls("clamp", x, -1.0, 2.0)
    yield from calls("clamp", x, None, 0.5)
    yield from calls("clamp", x, 2.0, 1.0)
    yield from calls("clamp_ clamp_min clamp_max clamp_min_ clamp_max_", x, 0.5)
    yield from calls("pow.Tensor_Scalar", x, 2)
    yield from calls("pow.Tensor_Scalar", x, 3)
    yield from calls("pow.Tensor_Scalar", x.abs(), 0.5)
    yield from calls("logical_not", x > 0)
    yield from calls("prelu", numbers(2, 4, 3), numbers(4))


def _arithmetic() -> Iterator[Case]:
    x, y, row = numbers(3, 5), numbers(3, 5, seed=1), numbers(5)
    whole = numbers(3, 5, dtype=torch.int32)
    yield from calls("add.Tensor", x, row, alpha=2)
    yield from calls("sub.Tensor", x, row, alpha=0.5)
    yield from calls("add.Scalar rsub.Scalar", x, 2, 3)
    yield from calls("sub.Scalar mul.Scalar div.Scalar", x, -1.5)
    yield from calls("add_.Scalar sub_.Scalar mul_.Scalar div_.Scalar", x, 3)
    yield from calls("add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor", x, y)
    yield from calls("mul.Tensor div.Tensor maximum minimum", x, row)
    yield from calls("add.Tensor mul.Tensor", whole, whole)
    yield from calls("pow.Tensor_Tensor", x.abs(), y)
    yield from calls("where.ScalarSelf", x > 0, 2.5, x)
    yield from calls("where.ScalarOther", x > 0, x, -1)
    yield from calls("where.self", x > 0, x, row)
    yield from calls("masked_fill.Scalar", x, y > 0, -7.5)
    yield from calls("addcmul", row, x, y, value=0.5)
    yield from calls("logical_and logical_or logical_xor", x > 0, y > 0)
    yield Case(
        "aten._assert_tensor_metadata.default",
        lambda t: (aten._assert_tensor_metadata(t, None, None, t.dtype), t + 1)[1],
        (x,),
    )
    strange = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0]).repeat(6, 1)
    names = ("eq", "ne", "lt", "le", "gt", "ge")
    tensor = " ".join(f"{name}.Tensor" for name in names)
    scalar = " ".join(f"{name}.Scalar" for name in names)
    for one, other in (
        (x.round(), y.round()),
        (whole, x.round()),
        (strange, strange.T.contiguous()),
    ):
        yield from calls(tensor, one, other)
    yield from calls(scalar, x.round(), 1)
    yield from calls(scalar, whole, 0.5)


def _matrices() -> Iterator[Case]:
    q, k, v = (numbers(2, 3, 7, 8, seed=seed) for seed in range(3))
    yield from calls("linear", numbers(2, 3, 8), numbers(4, 8), numbers(4))
    yield from calls("linear", numbers(3, 8), numbers(4, 8))
    yield from calls("linear", numbers(8), numbers(4, 8))
    yield from calls("matmul", numbers(2, 3, 4), numbers(4, 5))
    yield from calls("matmul", numbers(4), numbers(2, 4, 5))
    yield from calls("matmul mv", numbers(3, 4), numbers(4))
    yield from calls("mm", numbers(3, 4), numbers(4, 5))
    yield from calls("bmm", numbers(2, 3, 4), numbers(2, 4, 5))
    yield from calls("addmm", numbers(5), numbers(3, 4), numbers(4, 5))
    yield from calls("addmm", numbers(5), numbers(3, 4), numbers(4, 5), beta=2, alpha=0.5)
    yield from calls("addmm", numbers(5) / 0, numbers(3, 4), numbers(4, 5), beta=0)
    yield from calls("baddbmm", numbers(2, 3, 5), numbers(2, 3, 4), numbers(2, 4, 5))
    attention = "scaled_dot_product_attention"
    for options in ({}, {"is_causal": True}, {"scale": 0.25}):
        yield from calls(attention, q, k, v, **options)
    for mask in (numbers(7, 7), numbers(7, 7).abs() > 1, *_masks()):
        yield from calls(attention, q, k, v, mask)


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


def _movement() -> Iterator[Case]:
    x, image = numbers(2, 3, 4), numbers(2, 3, 4, 6)
    rows, places = torch.tensor([2, 0, 1, 2]), torch.tensor([[0, 1], [2, 1]])
    half, flat = numbers(1, dtype=torch.float16), numbers(1, 3, 1)
    yield from calls("alias clone contiguous detach lift_fresh_copy mT", x)
    yield from calls("view reshape _unsafe_view", x, [6, -1])
    yield from calls("reshape_as view_as", x, numbers(4, 6))
    yield from calls("expand_as", numbers(3, 1), x)
    yield from calls("flatten.using_ints unsqueeze", x, 1)
    yield from calls("unflatten.int", x, 2, [2, 2])
    yield from calls("squeeze", flat)
    yield from calls("squeeze.dim", flat, 0)
    yield from calls("squeeze.dims", flat, [0, 2])
    yield from calls("to.dtype_layout", x, dtype=torch.float16, layout=torch.strided)
    yield from calls("to.device", x, torch.device("cpu"), torch.float16)
    yield from calls("to.other type_as", x, half)
    for dtype, value in (
        (torch.float16, x),
        (torch.int32, x),
        (torch.bool, x.round()),
        (torch.float32, x > 0),
    ):
        yield from calls("to.dtype", value, dtype)
    yield from calls("_to_copy", x, dtype=torch.float16)
    yield Case("aten.to.dtype", lambda t: t.half().float(), (x * 100,))
    yield from calls("dropout", x, 0.5, False)
    yield from calls("permute", x, [2, 0, -2])
    yield from calls("transpose.int", x, 0, -1)
    yield from calls("t numpy_T", numbers(3, 4))
    yield from calls("split.Tensor", x, 3, 2)
    yield from calls("split.sizes split_with_sizes", x, [1, 3], -1)
    yield from calls("chunk", x, 2, 2)
    yield from calls("unbind.int", x, 1)
    yield from calls("unbind.int", x, 1, pick=lambda parts: parts[1])
    yield from calls("cat stack", [x, x + 1, x - 1], -1)
    yield from calls("cat", [x, torch.ones(0)], 1)
    yield from calls("expand", flat, [2, 2, -1, 4])
    yield from calls("repeat", x, [2, 1, 1, 3])
    yield from calls("slice.Tensor", x, 2, 1, -1)
    yield from calls("slice.Tensor", x, 2, -3, torch.iinfo(torch.int64).max, 2)
    yield from calls("slice.Tensor", x, 0, None, 1)
    yield from calls("narrow", x, 2, 1, 2)
    yield from calls("narrow", x, 2, -2, 2)
    yield from calls("select.int", x, 1, -1)
    yield from calls("flip", x, [0, 2])
    yield from calls("roll", x, [1, -2], [0, 2])
    yield from calls("embedding", numbers(3, 5), places)
    yield from calls("index_select", x, 1, rows)
    yield from calls("gather", numbers(3, 2), 0, places)
    yield from calls("index.Tensor", x, [None, rows])
    yield from calls("index.Tensor", numbers(3, 2), [places - 2])
    yield from calls("index.Tensor", x, [None, None, places.int()])
    yield from calls("pixel_shuffle", numbers(2, 8, 3, 5), 2)
    yield from calls("pixel_unshuffle", image, 2)


def _reductions() -> Iterator[Case]:
    x = numbers(2, 3, 4)
    yield from calls("amax sum.dim_IntList", x, [1])
    yield from calls("amin sum.dim_IntList", x, [0, -1])
    yield from calls("mean.dim", x, [1], True)
    yield from calls("sum.dim_IntList", x, None, True)
    yield from calls("prod.dim_int cumsum", x, 1)
    yield from calls("any.dim", x > 2, 1)
    yield from calls("all.dim", x > -2, 1, True)
    yield from calls("softmax.int log_softmax.int", x, -1)
    yield from calls("softmax.int", x.half(), -1, torch.float32)
    yield from calls("_softmax _log_softmax", x, 1, False)
    yield from calls("linalg_vector_norm", x, 2, [1])
    yield from calls("linalg_vector_norm", x, 1, None, True)
    yield from calls("var.correction std.correction", x, [1], correction=0)
    yield from calls("var.correction std.correction", x, None, keepdim=True)
    yield from calls("var.dim std.dim", x, [1, 2], False, True)


def _norms() -> Iterator[Case]:
    image = numbers(2, 4, 5, 3)
    scale, shift, mean, spread = (numbers(4, seed=seed) for seed in range(4))
    first: Any = lambda results: results[0]  # noqa: E731
    statistics = mean, spread.abs()
    yield from calls("batch_norm", image, scale, shift, *statistics, False, 0.1, 1e-5, True)
    yield from calls("batch_norm", image, None, None, *statistics, False, 0.1, 1e-3, True)
    yield from calls("_native_batch_norm_legit_no_training", image, scale, shift, *statistics,
                     0.1, 1e-5, pick=first)  # fmt: skip
    yield from calls("layer_norm", image, [5, 3], numbers(5, 3), numbers(5, 3))
    yield from calls("layer_norm", image, [3])
    yield from calls("native_layer_norm", image, [3], numbers(3), None, 1e-5, pick=first)
    yield from calls("group_norm", image, 2, scale, shift)
    yield from calls("group_norm", image, 4)
    yield from calls("native_group_norm", image, scale, shift, 2, 4, 15, 2, 1e-5, pick=first)
    yield from calls("rms_norm", image, [3], numbers(3))
    yield from calls("rms_norm", image, [5, 3], None, 1e-3)
    for dim, sizes in (
        *((0, (2, 1, 1, 1)), (3, (1, 1, 1, 3)), (-1, (1, 1, 1, 1))),
        *((-2, (1, 1, 5, 1)), (-3, (1, 4, 1, 1)), (-4, (2, 1, 1, 1))),
    ):
        yield from calls("_weight_norm", image, numbers(*sizes), dim)


def _windows() -> Iterator[Case]:
    image = numbers(2, 4, 9, 8)
    for rank, value in ((1, numbers(2, 4, 9)), (2, image), (3, numbers(1, 4, 5, 6, 7))):
        kernel = [3, 2, 3][:rank]
        weight, grouped = numbers(6, 4, *kernel), numbers(8, 1, *kernel)
        across, few, many = numbers(4, 3, *kernel), numbers(3), numbers(6)
        none, one, two, three = ([size] * rank for size in range(4))
        conv, same = f"conv{rank}d", f"conv{rank}d.padding"
        yield from calls(conv, value, weight, many, two, one)
        yield from calls(conv, value, weight, None, [1], [0], [2] * rank)
        yield from calls(conv, value, grouped, None, [1], [1], [1], 4)
        yield from calls(same, value, weight, many, [1], "same")
        yield from calls(same, value, weight, None, [1], "valid")
        transposed = f"conv_transpose{rank}d" + (".input" if rank > 1 else "")
        yield from calls(transposed, value, across, few, two, one, one)
        yield from calls(transposed, value, across, many, two, one, none, 2)
        more = (one, one, one, False, none, 1), (two, none, one, True, one, 2)
        yield from calls("convolution", value, weight, many, *more[0])
        yield from calls("convolution", value, across, None, *more[1])
        average, largest = f"avg_pool{rank}d", f"max_pool{rank}d"
        yield from calls(f"{average} {largest}", value, three, two, one)
        yield from calls(average, value, three, two, one, False, False)
        yield from calls(average, value, two, three, one, True)
        yield from calls(largest, value, two)
        yield from calls(largest, value, three, two, one, one, True)
        yield from calls(f"adaptive_avg_pool{rank}d", value, two)
    yield from calls("_adaptive_avg_pool2d", image, [1, 1])
    yield from calls("max_pool2d_with_indices", image, [3, 3], [2, 2], [1, 1], [1, 2],
                     pick=lambda results: results[0])  # fmt: skip
    yield from calls("constant_pad_nd", image, [1, 2, -1, 0], 2.5)
    yield from calls("pad reflection_pad2d replication_pad2d", image, [1, 2, 0, 3])
    yield from calls("pad", image, [1, 2, 0, 3], "reflect")
    yield from calls("pad", image, [1, 2, 0, 3], "replicate")
    for size, factors in (([18, 16], None), ([5, 11], None), (None, [2.0, 3.0])):
        yield from calls("upsample_nearest2d.vec", image, size, factors)
    for size, corners, factors in (
        ([18, 13], False, None),
        ([18, 13], True, None),
        (None, False, [2.0, 3.0]),
    ):
        yield from calls("upsample_bilinear2d.vec", image, size, corners, factors)


def _quantized() -> Iterator[Case]:
    x, weight = numbers(3, 4), numbers(4, 3)
    scales, zeros = torch.tensor([0.02, 0.5, 0.1]), torch.tensor([0, 3, -2])
    ops, limits = "quantized_decomposed::", (-128, 127, torch.int8)
    tensor = f"{ops}quantize_per_tensor", f"{ops}dequantize_per_tensor"
    back = getattr(torch.ops, ops[:-2]).dequantize_per_tensor
    yield from calls(tensor[0], x, 0.05, 3, *limits)
    yield from calls(tensor[0], x, 0.05, 100, 0, 255, torch.uint8)
    yield from calls(tensor[0], x, 0.05, 3, *limits, pick=lambda y: back(y, 0.05, 3, *limits))
    yield from calls(tensor[1], x.to(torch.int8), 0.05, 3, *limits)
    channels = scales, zeros, 1, *limits
    yield from calls(f"{ops}quantize_per_channel", weight, *channels)
    yield from calls(f"{ops}dequantize_per_channel", weight.to(torch.int8), *channels)


CASES = [
    *(*_unary(), *_arithmetic(), *_matrices(), *_movement()),
    *(*_reductions(), *_norms(), *_windows(), *_quantized()),
]
