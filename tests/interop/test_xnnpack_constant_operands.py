"""Every operator that XNNPACK takes, each of its operands constant or not, from path and bytes.

The runtime frees what it packs, and packs again where one operand is computed. From bytes that
stays unseen, since the whole file lives in memory; from a path it has crashed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

from lowerdeck.lowered_module import to_backend
from lowerdeck.torch_base import schema_of
from lowerdeck.xnnpack import XnnpackBackend, XnnpackPartitioner
from lowerdeck_zoo import Of, assert_close
from tests.interop.runs import delegates, file_of, run

LINES, IMAGE, MATRIX, ROWS, COLUMN = (2, 4, 6), (2, 4, 6, 6), (3, 5), (2, 3, 4), (2, 1, 4)
VOLUME, THREE = (2, 4, 4, 5, 6), [1, 1, 1]
POOL = ([2, 2], [2, 2], [0, 0], [1, 1])
STATISTICS = ((4,),) * 4
MASK = torch.tensor([True, False, False, True])
ZEROS, ONES = [0, 0], [1, 1]
RECURRENT = (True, 1, 0.0, False, False, False)
CPU, FLOAT = torch.device("cpu"), torch.float32
_SAME = "add.Tensor sub.Tensor rsub.Tensor mul.Tensor"
_ALONE = (
    "abs ceil cos exp floor hardswish log neg rsqrt sigmoid sin sqrt square"
    " tanh elu gelu hardsigmoid leaky_relu reciprocal silu"
    " relu relu6 hardtanh alias alias_copy clone contiguous detach"
    " detach_copy _to_copy squeeze squeeze_copy mean sum amax amin max min celu mish"
    " selu softplus glu mT std var std_mean var_mean lift_fresh_copy positive"
    " to.dtype_layout"
)
# Operators, with overloads where they are not the default, and arguments for each of several
# calls: a tuple of sizes is a tensor, a list of them such a list.
TABLE: list[tuple[Any, ...]] = [
    (_ALONE, (ROWS,)),
    ("mH adjoint numpy_T t t_copy", (MATRIX,)),
    ("swapdims", (ROWS, 0, 2)),
    ("std.dim var.dim std_mean.dim var_mean.dim", (ROWS, [1])),
    ("std.correction var.correction std_mean.correction var_mean.correction", (ROWS, [1])),
    ("repeat tile", (ROWS, [2, 1, 3])),
    ("repeat_interleave.self_int", (ROWS, 2, 1)),
    ("flip", (ROWS, [0, 2])),
    ("min.dim", (ROWS, 1)),
    ("index_select", (ROWS, 1, torch.tensor([2, 0, 2]))),
    ("index.Tensor", (ROWS, [torch.tensor([1, 0, 1])])),
    ("adaptive_avg_pool1d avg_pool1d max_pool1d", (ROWS, [2])),
    ("lstm.input", (ROWS, [(1, 3, 5), (1, 3, 5)], [(20, 4), (20, 5), (20,), (20,)], *RECURRENT)),
    ("gru.input", (ROWS, (1, 3, 5), [(15, 4), (15, 5), (15,), (15,)], *RECURRENT)),
    ("clamp", (ROWS, -0.5, 0.5)),
    ("clamp_min clamp_max", (ROWS, 0.1)),
    (f"{_SAME} div.Tensor maximum minimum", (ROWS, ROWS), (ROWS, (4,))),
    ("add.Scalar sub.Scalar rsub.Scalar mul.Scalar div.Scalar", (ROWS, 0.5)),
    ("pow.Tensor_Scalar", (ROWS, 3)),
    ("prelu", (IMAGE, (4,)), (IMAGE, (1,))),
    ("_prelu_kernel", (IMAGE, (1, 4, 1, 1))),
    ("_softmax", (ROWS, 1, False)),
    ("_log_softmax", (ROWS, -1, False)),
    ("softmax.int log_softmax.int", (ROWS, -1)),
    ("scaled_dot_product_attention", ((2, 2, 3, 4),) * 3),
    ("batch_norm", (IMAGE, *STATISTICS, False, 0.1, 1e-5, False)),
    ("_native_batch_norm_legit.no_stats", (IMAGE, (4,), (4,), True, 0.1, 1e-5)),
    ("instance_norm", (IMAGE, (4,), (4,), None, None, True, 0.1, 1e-5, False)),
    ("_native_batch_norm_legit_no_training", (IMAGE, *STATISTICS, 0.1, 1e-5)),
    ("conv1d", (LINES, (6, 4, 3), (6,)), (LINES, (6, 4, 3))),
    ("conv1d.padding", (LINES, (6, 4, 2), (6,), [1], "same")),
    ("conv2d", (IMAGE, (6, 4, 3, 3), (6,)), (IMAGE, (4, 1, 3, 3), (4,), ONES, ONES, ONES, 4)),
    ("conv2d.padding", (IMAGE, (6, 4, 3, 2), (6,), ONES, "same")),
    ("conv_transpose1d", (LINES, (4, 3, 3), (3,))),
    ("conv_transpose2d.input", (IMAGE, (4, 3, 3, 3), (3,)), (IMAGE, (4, 3, 3, 3))),
    (
        "convolution",
        (IMAGE, (6, 4, 3, 3), (6,), ONES, ZEROS, ONES, False, ZEROS, 1),
        (IMAGE, (4, 3, 3, 3), (3,), ONES, ZEROS, ONES, True, ZEROS, 1),
        (VOLUME, (6, 4, 2, 3, 3), (6,), THREE, [0] * 3, THREE, False, [0] * 3, 1),
    ),
    (
        "conv3d",
        (VOLUME, (6, 4, 2, 3, 3), (6,)),
        (VOLUME, (6, 2, 3, 2, 2), (6,), [2, 1, 2], THREE, THREE, 2),
    ),
    ("max_pool3d max_pool3d_with_indices", (VOLUME, [2, 2, 2])),
    ("adaptive_avg_pool3d _adaptive_avg_pool3d", (VOLUME, THREE)),
    ("linear", (MATRIX, (7, 5), (7,)), (MATRIX, (7, 5)), ((2, 3, 5), (7, 5), (1,))),
    ("addmm", ((7,), MATRIX, (5, 7)), ((1, 7), MATRIX, (5, 7)), ((1,), MATRIX, (5, 7))),
    ("mm", (MATRIX, (5, 7))),
    ("bmm", ((2, *MATRIX), (2, 5, 7))),
    ("matmul", ((2, *MATRIX), (2, 5, 7)), ((2, *MATRIX), (5, 7)), (MATRIX, (2, 5, 7))),
    ("layer_norm", (ROWS, [4], (4,), (4,)), (ROWS, [4])),
    ("native_layer_norm", (ROWS, [4], (4,), (4,), 1e-5)),
    ("rms_norm", (ROWS, [4], (4,), 1e-5), (ROWS, [3, 4])),
    ("group_norm", (IMAGE, 2, (4,), (4,)), (IMAGE, 1, (4,), (4,))),
    ("native_group_norm", (IMAGE, (4,), (4,), 2, 4, 36, 2, 1e-5)),
    ("pixel_shuffle channel_shuffle", (IMAGE, 2)),
    ("upsample_nearest2d.vec", (IMAGE, None, [2.0, 3.0]), (IMAGE, [12, 6], None)),
    ("upsample_nearest2d", (IMAGE, [18, 12])),
    ("upsample_bilinear2d.vec", (IMAGE, [9, 9], False, None)),
    ("upsample_bilinear2d", (IMAGE, [9, 9], False)),
    ("cat", ([ROWS, ROWS, ROWS], 1)),
    ("stack", ([ROWS, ROWS], 1)),
    ("slice.Tensor slice_copy.Tensor", (ROWS, 1, 1, 3)),
    ("select.int select_copy.int", (ROWS, 1, 1)),
    ("unbind.int unbind_copy.int unsqueeze unsqueeze_copy flatten.using_ints", (ROWS, 1)),
    ("split.Tensor split_copy.Tensor", (ROWS, 2, 1)),
    ("chunk", (ROWS, 2, 2)),
    ("split_with_sizes split_with_sizes_copy split.sizes", (ROWS, [1, 2], 1)),
    ("constant_pad_nd", (ROWS, [1, 2], 0.5)),
    ("pad _pad_circular reflection_pad1d replication_pad1d", (ROWS, [1, 2])),
    ("reflection_pad2d replication_pad2d", (IMAGE, [1, 2] * 2)),
    ("reflection_pad3d replication_pad3d", (VOLUME, [1, 2] * 3)),
    ("max_pool2d max_pool2d_with_indices", (IMAGE, *POOL)),
    ("avg_pool2d", (IMAGE, *POOL[:3])),
    ("adaptive_avg_pool2d _adaptive_avg_pool2d", (IMAGE, [3, 3])),
    ("max.dim", (IMAGE, 3)),
    ("amax", (IMAGE, [3])),
    ("mean.dim sum.dim_IntList", (ROWS, [-1])),
    ("dropout alpha_dropout feature_dropout", (ROWS, 0.5, False)),
    ("to.dtype", (ROWS, FLOAT)),
    ("to.device", (ROWS, CPU, FLOAT)),
    ("view view_copy reshape _unsafe_view", (ROWS, [6, 4])),
    ("unflatten.int", (ROWS, 2, [2, 2])),
    ("squeeze.dim squeeze_copy.dim", (COLUMN, 1)),
    ("squeeze.dims squeeze_copy.dims", (COLUMN, [1])),
    ("permute permute_copy", (ROWS, [2, 0, 1])),
    ("transpose.int transpose_copy.int", (ROWS, 0, 1)),
    ("expand expand_copy", (COLUMN, [2, 3, 4])),
    ("expand_as", (COLUMN, ROWS)),
    ("masked_fill.Scalar", (ROWS, MASK, -1e9)),
    ("where.ScalarSelf", (MASK, -1e9, ROWS)),
    ("where.ScalarOther", (MASK, ROWS, -1e9)),
    ("addcmul", (ROWS, ROWS, (4,))),
    ("reshape_as view_as", (ROWS, (6, 4))),
    ("type_as", (ROWS, (4,))),
    ("linalg_vector_norm", (ROWS, 2, [-1], True)),
    ("roll", (ROWS, [1], [2])),
]
CALLS: dict[str, list[tuple[Any, ...]]] = {
    name if "." in name else f"{name}.default": calls
    for names, *calls in TABLE
    for name in names.split()
}


def is_sizes(value: object) -> bool:
    return isinstance(value, tuple)


class OneCall(nn.Module):
    """Calls one operator; the tensors at the positions ``constant`` are buffers."""

    def __init__(self, target: Any, arguments: tuple[Any, ...], constant: tuple[int, ...]) -> None:
        super().__init__()
        self.target, self.arguments, self.constant = target, arguments, constant
        for position, sizes in enumerate(tensors_of(arguments)):
            if position in constant:
                self.register_buffer(f"c{position}", torch.rand(sizes) + 0.5)

    def forward(self, *inputs: Tensor) -> Any:
        given = iter(inputs)
        numbers = itertools.count()

        def operand(value: Any) -> Any:
            if isinstance(value, list):
                return [operand(each) for each in value]
            if not is_sizes(value):
                return value
            number = next(numbers)
            return self.get_buffer(f"c{number}") if number in self.constant else next(given) * 2

        result = self.target(*map(operand, self.arguments))
        return result if isinstance(result, Tensor) else result[0]


def tensors_of(arguments: tuple[Any, ...]) -> list[tuple[int, ...]]:
    flat = [each for one in arguments for each in (one if isinstance(one, list) else [one])]
    return [one for one in flat if is_sizes(one)]


def constant_subsets(arguments: tuple[Any, ...]) -> Iterator[tuple[int, ...]]:
    """Yield which operands are constant; statistics of norms only together or one alone."""
    count = len(tensors_of(arguments))
    for size in range(count):
        if count > 3 and size not in (0, 1, count - 1):
            continue
        yield from itertools.combinations(range(count), size)


def test_each_operator_of_the_table_has_calls() -> None:
    names = {one for one in XnnpackBackend.supported_operators if one.startswith("aten.")}
    # The fill of ``where.self`` must be a call of ``scalar_tensor``: see the cases of masks.
    assert {f"aten.{name}" for name in CALLS} == names - {"aten.where.self"}


def models_of(name: str, subsets: Any) -> Iterator[tuple[OneCall, tuple[Tensor, ...]]]:
    """Yield models of an operator's calls, and their inputs.

    Args:
        name: The operator.
        subsets: Returns which operands of a call are constant, each time.
    """
    operator, overload = name.split(".")
    target = getattr(getattr(torch.ops.aten, operator), overload)
    for arguments in CALLS[name]:
        for constant in subsets(arguments):
            if 0 in constant and schema_of(target).is_mutable:
                continue  # what it writes is state
            sizes = enumerate(tensors_of(arguments))
            inputs = tuple(torch.rand(one) + 0.5 for at, one in sizes if at not in constant)
            yield OneCall(target, arguments, constant).eval(), inputs


def assert_runs_as_eager(model: nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> None:
    """Run the file twice from bytes and from a path."""
    file = file_of(model, inputs)
    with torch.no_grad():
        expected = model(*inputs)
    for where in (None, folder):
        for found in run(file, [inputs] * 2, where):
            assert_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_any_operand_may_be_constant(name: str, tmp_path: Path) -> None:
    for model, inputs in models_of(name, constant_subsets):
        assert_runs_as_eager(model, inputs, tmp_path)


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("square", torch.rand(4, 4) + 0.5)
        self.register_buffer("row", torch.rand(4))
        self.register_buffer("other", torch.rand(4))


def _convolved(y: Tensor, square: Tensor) -> Tensor:
    return conv2d(y.reshape(1, 4, 4, 1), square.reshape(4, 4, 1, 1)).reshape(4, 4)


# Reads of one constant in two ways: of y, a square, a row and another row.
SHARED: dict[str, Any] = {
    "packed and read": lambda y, s, r, _: linear(y, s, r) + s + r,
    "packed both ways": lambda y, s, r, _: linear(y, s) + y @ s,
    "packed with two biases": lambda y, s, r, o: linear(y, s, r) + linear(y, s, o),
    "packed with and without bias": lambda y, s, r, _: linear(y, s, r) * linear(y, s),
    "bias apart and packed": lambda y, s, r, _: linear(y, y, r) + linear(y, s, r),
    "filter apart and packed": lambda y, s, r, _: linear(y, s, y[0]) + linear(y, s, r),
    "linear and convolution": lambda y, s, r, _: linear(y, s) + _convolved(y, s),
    "two delegates": lambda y, s, r, _: linear(torch.erf(linear(y, s, r)), s, r),
    "delegate and kernel": lambda y, s, r, _: torch.erf(linear(y, s, r) + torch.erf(y @ s + s)),
}


@pytest.mark.parametrize("way", SHARED)
def test_a_constant_may_be_read_in_two_ways(way: str, tmp_path: Path) -> None:
    model = Of(
        lambda m, x: SHARED[way](x * 2, m.held.square, m.held.row, m.held.other),
        held=Constants(),
    )
    x = torch.rand(4, 4)
    assert delegates(to_backend(torch.export.export(model, (x,)), XnnpackPartitioner()))
    assert_runs_as_eager(model, (x,), tmp_path)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("repeated", [(1, 1, 6, 6), (2, 4, 1, 1), (1, 4, 1, 6), (6,), (4, 1, 1)])
def test_constants_that_repeat(
    tmp_path: Path, layout: torch.memory_format, repeated: tuple[int, ...]
) -> None:
    rows = torch.rand(repeated, generator=torch.Generator().manual_seed(1)) + 1
    known = rows.expand(IMAGE[-len(repeated) :]).contiguous()
    functions = (torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum)
    x = torch.randn(IMAGE).contiguous(memory_format=layout)
    for function in functions:
        model = Of(lambda x, f=function: (f(known, x), f(x, known)))
        assert_runs_as_eager(model, (x,), tmp_path)
