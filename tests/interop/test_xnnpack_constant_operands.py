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

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.torch_base import schema_of
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck.xnnpack.operators.table import OPERATORS
from lowerdeck_zoo import official

pytestmark = [
    pytest.mark.skipif(not official.available(), reason=official.REASON),
    # torch's own, from copying a tree spec inside run_decompositions
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning"),
    # and of even kernels
    pytest.mark.filterwarnings("ignore:Using padding=.same.:UserWarning"),
]

IMAGE, MATRIX, ROWS = (2, 4, 6, 6), (3, 5), (2, 3, 4)
POOL = ([2, 2], [2, 2], [0, 0], [1, 1])
STATISTICS = ((4,),) * 4
ZEROS, ONES = [0, 0], [1, 1]
VOLUME, THREE = (2, 4, 4, 5, 6), [1, 1, 1]
RECURRENT = (True, 1, 0.0, False, False, False)
# What each operator is called with: a tuple of sizes is a tensor, a list of them such a list.
CALLS: dict[str, list[tuple[Any, ...]]] = {
    **{
        f"{name}.default": [(ROWS,)]
        for name in (
            *("abs", "ceil", "cos", "exp", "floor", "hardswish", "hardswish_", "log", "neg"),
            *("rsqrt", "sigmoid", "sigmoid_", "sin", "sqrt", "square", "tanh", "tanh_", "elu"),
            *("elu_", "gelu", "hardsigmoid", "hardsigmoid_", "leaky_relu", "leaky_relu_"),
            *("reciprocal", "silu", "silu_", "relu", "relu_", "relu6", "relu6_", "hardtanh"),
            *("hardtanh_", "alias", "alias_copy", "clone", "contiguous", "detach", "detach_copy"),
            *("_to_copy", "squeeze", "squeeze_copy", "mean", "sum", "amax", "amin", "max", "min"),
            *("celu", "celu_", "mish", "mish_", "selu", "selu_", "softplus", "glu", "mT", "std"),
            "var",
        )
    },
    **{f"{name}.default": [(MATRIX,)] for name in ("mH", "adjoint", "numpy_T")},
    **{f"{name}.default": [(ROWS, 0, 2)] for name in ("swapaxes", "swapdims")},
    **{f"{name}.default": [(ROWS,)] for name in ("std_mean", "var_mean")},
    **{
        f"{name}.{overload}": [(ROWS, [1])]
        for name in ("std", "var", "std_mean", "var_mean")
        for overload in ("dim", "correction")
    },
    **{f"{name}.default": [(ROWS, [2, 1, 3])] for name in ("repeat", "tile")},
    "repeat_interleave.self_int": [(ROWS, 2, 1)],
    "flip.default": [(ROWS, [0, 2])],
    "movedim.int": [(ROWS, 0, 2)],
    "movedim.intlist": [(ROWS, [0, 1], [2, 0])],
    "min.dim": [(ROWS, 1)],
    "index_select.default": [(ROWS, 1, torch.tensor([2, 0, 2]))],
    "index.Tensor": [(ROWS, [torch.tensor([1, 0, 1])])],
    "adaptive_avg_pool1d.default": [(ROWS, [2])],
    "avg_pool1d.default": [(ROWS, [2])],
    "max_pool1d.default": [(ROWS, [2])],
    "lstm.input": [
        (ROWS, [(1, 3, 5), (1, 3, 5)], [(20, 4), (20, 5), (20,), (20,)], *RECURRENT),
    ],
    "gru.input": [(ROWS, (1, 3, 5), [(15, 4), (15, 5), (15,), (15,)], *RECURRENT)],
    **{
        f"rnn_{name}.input": [(ROWS, (1, 3, 5), [(5, 4), (5, 5), (5,), (5,)], *RECURRENT)]
        for name in ("tanh", "relu")
    },
    **{f"{name}.default": [(ROWS, -0.5, 0.5)] for name in ("clamp", "clamp_")},
    **{f"{name}.default": [(ROWS, 0.1)] for name in ("clamp_min", "clamp_max")},
    **{
        f"{name}.Tensor": [(ROWS, ROWS), (ROWS, (4,))]
        for name in ("add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_")
    },
    **{f"{name}.Scalar": [(ROWS, 0.5)] for name in ("add", "sub", "rsub", "mul", "div")},
    **{f"{name}.default": [(ROWS, ROWS), (ROWS, (4,))] for name in ("maximum", "minimum")},
    "pow.Tensor_Scalar": [(ROWS, 3)],
    "prelu.default": [(IMAGE, (4,)), (IMAGE, (1,))],
    "_prelu_kernel.default": [(IMAGE, (1, 4, 1, 1))],
    "_softmax.default": [(ROWS, 1, False)],
    "softmax.int": [(ROWS, -1)],
    "scaled_dot_product_attention.default": [((2, 2, 3, 4),) * 3],
    "batch_norm.default": [(IMAGE, *STATISTICS, False, 0.1, 1e-5, False)],
    "_native_batch_norm_legit.no_stats": [(IMAGE, (4,), (4,), True, 0.1, 1e-5)],
    "instance_norm.default": [
        (IMAGE, (4,), (4,), None, None, True, 0.1, 1e-5, False),
    ],
    "_native_batch_norm_legit_no_training.default": [(IMAGE, *STATISTICS, 0.1, 1e-5)],
    "conv1d.default": [((2, 4, 6), (6, 4, 3), (6,)), ((2, 4, 6), (6, 4, 3))],
    "conv1d.padding": [((2, 4, 6), (6, 4, 2), (6,), [1], "same")],
    "conv2d.default": [
        (IMAGE, (6, 4, 3, 3), (6,)),
        (IMAGE, (4, 1, 3, 3), (4,), ONES, ONES, ONES, 4),
    ],
    "conv2d.padding": [(IMAGE, (6, 4, 3, 2), (6,), ONES, "same")],
    "conv_transpose1d.default": [((2, 4, 6), (4, 3, 3), (3,))],
    "conv_transpose2d.input": [(IMAGE, (4, 3, 3, 3), (3,)), (IMAGE, (4, 3, 3, 3))],
    "convolution.default": [
        (IMAGE, (6, 4, 3, 3), (6,), ONES, ZEROS, ONES, False, ZEROS, 1),
        (IMAGE, (4, 3, 3, 3), (3,), ONES, ZEROS, ONES, True, ZEROS, 1),
        (VOLUME, (6, 4, 2, 3, 3), (6,), THREE, [0] * 3, THREE, False, [0] * 3, 1),
    ],
    "conv3d.default": [
        (VOLUME, (6, 4, 2, 3, 3), (6,)),
        (VOLUME, (6, 2, 3, 2, 2), (6,), [2, 1, 2], THREE, THREE, 2),
    ],
    **{
        f"{name}.default": [(VOLUME, [2, 2, 2])]
        for name in ("avg_pool3d", "max_pool3d", "max_pool3d_with_indices")
    },
    **{
        f"{name}.default": [(VOLUME, THREE)]
        for name in ("adaptive_avg_pool3d", "_adaptive_avg_pool3d")
    },
    "linear.default": [(MATRIX, (7, 5), (7,)), (MATRIX, (7, 5)), ((2, 3, 5), (7, 5), (7,))],
    "addmm.default": [((7,), MATRIX, (5, 7)), ((1, 7), MATRIX, (5, 7))],
    "mm.default": [(MATRIX, (5, 7))],
    "bmm.default": [((2, *MATRIX), (2, 5, 7))],
    "matmul.default": [((2, *MATRIX), (2, 5, 7)), ((2, *MATRIX), (5, 7)), (MATRIX, (2, 5, 7))],
    "layer_norm.default": [(ROWS, [4], (4,), (4,)), (ROWS, [4])],
    "native_layer_norm.default": [(ROWS, [4], (4,), (4,), 1e-5)],
    "pixel_shuffle.default": [(IMAGE, 2)],
    "pixel_unshuffle.default": [(IMAGE, 2)],
    "channel_shuffle.default": [(IMAGE, 2)],
    "upsample_nearest2d.vec": [(IMAGE, None, [2.0, 3.0]), (IMAGE, [12, 6], None)],
    "upsample_nearest2d.default": [(IMAGE, [18, 12])],
    "rms_norm.default": [(ROWS, [4], (4,), 1e-5), (ROWS, [3, 4])],
    "group_norm.default": [(IMAGE, 2, (4,), (4,)), (IMAGE, 1, (4,), (4,))],
    "native_group_norm.default": [(IMAGE, (4,), (4,), 2, 4, 36, 2, 1e-5)],
    "cat.default": [([ROWS, ROWS, ROWS], 1)],
    "stack.default": [([ROWS, ROWS], 1)],
    "slice.Tensor": [(ROWS, 1, 1, 3)],
    "slice_copy.Tensor": [(ROWS, 1, 1, 3)],
    "select.int": [(ROWS, 1, 1)],
    "select_copy.int": [(ROWS, 1, 1)],
    "unbind.int": [(ROWS, 1)],
    "unbind_copy.int": [(ROWS, 1)],
    "split.Tensor": [(ROWS, 2, 1)],
    "split_copy.Tensor": [(ROWS, 2, 1)],
    "chunk.default": [(ROWS, 2, 2)],
    "split_with_sizes.default": [(ROWS, [1, 2], 1)],
    "split_with_sizes_copy.default": [(ROWS, [1, 2], 1)],
    "split.sizes": [(ROWS, [1, 2], 1)],
    "constant_pad_nd.default": [(ROWS, [1, 2], 0.5)],
    "pad.default": [(ROWS, [1, 2])],
    **{
        f"{kind}_pad{rank}d.default": [(sizes, [1, 2] * rank)]
        for kind in ("reflection", "replication")
        for rank, sizes in ((1, ROWS), (2, IMAGE), (3, VOLUME))
    },
    "_pad_circular.default": [(ROWS, [1, 2])],
    "max_pool2d.default": [(IMAGE, *POOL)],
    "max_pool2d_with_indices.default": [(IMAGE, *POOL)],
    "avg_pool2d.default": [(IMAGE, *POOL[:3])],
    "adaptive_avg_pool2d.default": [(IMAGE, [3, 3])],
    "_adaptive_avg_pool2d.default": [(IMAGE, [3, 3])],
    "upsample_bilinear2d.vec": [(IMAGE, [9, 9], False, None)],
    "upsample_bilinear2d.default": [(IMAGE, [9, 9], False)],
    "max.dim": [(IMAGE, 3)],
    "mean.dim": [(ROWS, [-1])],
    "sum.dim_IntList": [(ROWS, [-1])],
    "amax.default": [(IMAGE, [3])],
    "dropout.default": [(ROWS, 0.5, False)],
    "to.dtype": [(ROWS, torch.float32)],
    "to.dtype_layout": [(ROWS,)],
    "view.default": [(ROWS, [6, 4])],
    "view_copy.default": [(ROWS, [6, 4])],
    "reshape.default": [(ROWS, [6, 4])],
    "_unsafe_view.default": [(ROWS, [6, 4])],
    "flatten.using_ints": [(ROWS, 1)],
    "unflatten.int": [(ROWS, 2, [2, 2])],
    "unsqueeze.default": [(ROWS, 1)],
    "unsqueeze_copy.default": [(ROWS, 1)],
    "squeeze.dim": [((2, 1, 4), 1)],
    "squeeze.dims": [((2, 1, 4), [1])],
    "squeeze_copy.dim": [((2, 1, 4), 1)],
    "squeeze_copy.dims": [((2, 1, 4), [1])],
    "permute.default": [(ROWS, [2, 0, 1])],
    "permute_copy.default": [(ROWS, [2, 0, 1])],
    "transpose.int": [(ROWS, 0, 1)],
    "transpose_copy.int": [(ROWS, 0, 1)],
    "t.default": [(MATRIX,)],
    "t_copy.default": [(MATRIX,)],
    "expand.default": [((2, 1, 4), [2, 3, 4])],
    "expand_copy.default": [((2, 1, 4), [2, 3, 4])],
    "_log_softmax.default": [(ROWS, -1, False)],
    "log_softmax.int": [(ROWS, -1)],
    "addcmul.default": [(ROWS, ROWS, (4,))],
    "alpha_dropout.default": [(ROWS, 0.5, False)],
    "feature_dropout.default": [(ROWS, 0.5, False)],
    "dropout_.default": [(ROWS, 0.5, False)],
    "as_strided.default": [(ROWS, [2, 12], [12, 1])],
    "as_strided_copy.default": [(ROWS, [2, 12], [12, 1])],
    "expand_as.default": [((2, 1, 4), ROWS)],
    "reshape_as.default": [(ROWS, (6, 4))],
    "view_as.default": [(ROWS, (6, 4))],
    "type_as.default": [(ROWS, (4,))],
    "lift_fresh_copy.default": [(ROWS,)],
    "positive.default": [(ROWS,)],
    "linalg_vector_norm.default": [(ROWS, 2, [-1], True)],
    "roll.default": [(ROWS, [1], [2])],
    "to.device": [(ROWS, torch.device("cpu"), torch.float32)],
}


def is_sizes(value: object) -> bool:
    return isinstance(value, tuple)


class OneCall(torch.nn.Module):
    """Calls one operator; the tensors at the positions ``constant`` are buffers."""

    def __init__(self, target: Any, arguments: tuple[Any, ...], constant: tuple[int, ...]) -> None:
        super().__init__()
        self.target, self.arguments, self.constant = target, arguments, constant
        for position, sizes in enumerate(tensors_of(arguments)):
            if position in constant:
                self.register_buffer(f"c{position}", torch.rand(sizes) + 0.5)

    def forward(self, *inputs: torch.Tensor) -> Any:
        given = iter(inputs)
        numbers = itertools.count()

        def operand(_: object) -> torch.Tensor:
            number = next(numbers)
            # Computed in the partition, so that operators in place may write it.
            return self.get_buffer(f"c{number}") if number in self.constant else next(given) * 2

        arguments = [
            operand(one)
            if is_sizes(one)
            else [operand(each) for each in one]
            if isinstance(one, list) and any(map(is_sizes, one))
            else one
            for one in self.arguments
        ]
        result = self.target(*arguments)
        return result if isinstance(result, torch.Tensor) else result[0]


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


def named(operator: Any) -> str:
    return str(operator).removeprefix("aten.")


def test_each_operator_of_the_table_has_calls() -> None:
    assert {named(operator) for operator in OPERATORS} == set(CALLS)


def program_of(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[bytes, bool]:
    """Return the file, and whether a delegate is in it."""
    program = to_backend(torch.export.export(model, inputs), XnnpackPartitioner())
    delegated = any("call_delegate" in str(node.target) for node in program.graph.nodes)
    return emit(program).to_bytes(), delegated


def assert_runs_as_eager(
    file: bytes, model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], path: Path
) -> None:
    """Run the file twice from bytes and from a path."""
    path.write_bytes(file)
    with torch.no_grad():
        expected = model(*inputs)
    for program in (file, path):
        outcome = official.run(program, [official.Call(inputs)] * 2)
        assert isinstance(outcome, official.Ran), (program == path, outcome)
        for (found,) in outcome.outputs:
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_any_operand_may_be_constant(name: str, tmp_path: Path) -> None:
    target = next(operator for operator in OPERATORS if named(operator) == name)
    for arguments in CALLS[name]:
        for constant in constant_subsets(arguments):
            if 0 in constant and schema_of(target).is_mutable:
                continue  # what it writes is state
            model = OneCall(target, arguments, constant).eval()
            inputs = tuple(
                torch.rand(sizes) + 0.5
                for position, sizes in enumerate(tensors_of(arguments))
                if position not in constant
            )
            file, _ = program_of(model, inputs)
            assert_runs_as_eager(file, model, inputs, tmp_path / "file.pte")


class Shared(torch.nn.Module):
    """Reads one constant in two ways; ``way`` says which."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("square", torch.rand(4, 4) + 0.5)
        self.register_buffer("row", torch.rand(4))
        self.register_buffer("other", torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square, row, linear = self.square, self.row, torch.nn.functional.linear
        y = x * 2
        if self.way == "packed and read":
            return linear(y, square, row) + square + row
        if self.way == "packed both ways":
            return linear(y, square) + y @ square
        if self.way == "packed with two biases":
            return linear(y, square, row) + linear(y, square, self.other)
        if self.way == "packed with and without bias":
            return linear(y, square, row) * linear(y, square)
        if self.way == "bias apart and packed":
            return linear(y, y, row) + linear(y, square, row)
        if self.way == "filter apart and packed":
            return linear(y, square, y[0]) + linear(y, square, row)
        if self.way == "linear and convolution":
            image = torch.nn.functional.conv2d(y.reshape(1, 4, 4, 1), square.reshape(4, 4, 1, 1))
            return linear(y, square) + image.reshape(4, 4)
        if self.way == "two delegates":
            return linear(torch.erf(linear(y, square, row)), square, row)
        if self.way == "delegate and kernel":
            return torch.erf(linear(y, square, row) + torch.erf(y @ square + square))
        raise ValueError(self.way)


@pytest.mark.parametrize(
    "way",
    [
        *("packed and read", "packed both ways", "packed with two biases"),
        *("packed with and without bias", "bias apart and packed", "filter apart and packed"),
        *("linear and convolution", "two delegates", "delegate and kernel"),
    ],
)
def test_a_constant_may_be_read_in_two_ways(way: str, tmp_path: Path) -> None:
    model, inputs = Shared(way).eval(), (torch.rand(4, 4),)
    file, delegated = program_of(model, inputs)
    assert delegated
    assert_runs_as_eager(file, model, inputs, tmp_path / "file.pte")


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "maximum", "minimum"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("repeated", [(1, 1, 6, 6), (2, 4, 1, 1), (1, 4, 1, 6), (6,), (4, 1, 1)])
def test_constants_that_repeat(
    tmp_path: Path, name: str, first: bool, layout: torch.memory_format, repeated: tuple[int, ...]
) -> None:
    rows = torch.rand(repeated, generator=torch.Generator().manual_seed(1)) + 1
    known = rows.expand(IMAGE[-len(repeated) :]).contiguous()
    function = getattr(torch, name)

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(known, x) if first else function(x, known)

    x = torch.randn(IMAGE).contiguous(memory_format=layout)
    file, _ = program_of(Model(), (x,))
    assert_runs_as_eager(file, Model(), (x,), tmp_path / "file.pte")
