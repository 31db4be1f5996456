"""Programs that no kernel computes, or that would run with other numbers than eager's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.testing._internal.two_tensor import TwoTensor

from lowerdeck.emitter import (
    EmitConfig,
    EmitterError,
    MissingKernelError,
    UnboundedSizeError,
    UnsupportedError,
    emit,
)
from lowerdeck_zoo import Of, exported

importlib.import_module("torch.ao.quantization.fx._decomposed")
pytestmark = pytest.mark.filterwarnings("ignore")
qd = torch.ops.quantized_decomposed
SQUARE, IMAGES = torch.ones(4, 4), torch.ones(3, 4)
HALF = torch.full((3, 4), 0.5)


def _complex(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(torch.view_as_complex(x.view(4, 2, 2))).abs()


def _strides(*args: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.as_strided_copy(x, *args)


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    **{
        f"complex {name}": (_complex(function), "complex")
        for name, function in {
            "power": lambda c: c**3,
            "comparison": lambda c: c == c.flip(0),
            "root": torch.sqrt,
            "triangle": torch.tril,
        }.items()
    },
    # Eager reads by strides into the memory of another tensor, which a program does not have.
    "strides of a column": (lambda x: (x * 2)[:, 0].as_strided((2, 2), (1, 2)), "slices or an"),
    "strides, a column copied": (
        lambda x: _strides((2, 2), (1, 2))((x * 2)[:, 0]),
        "slices or an",
    ),
    "strides, transposed": (lambda x: _strides((2, 2), (1, 2))((x * 2).mT), "slices or an index"),
    "strides before": (lambda x: (x * 2)[1].as_strided((2, 2), (1, 2), 0), "slices or an index"),
    "strides past": (lambda x: (x * 2)[0].as_strided((2, 3), (3, 2)), "slices or an|reads past"),
    "poisson": (torch.poisson, "aten.poisson"),
    "multinomial": (lambda x: torch.multinomial(x, 2), "aten.multinomial"),
    "binomial": (lambda x: torch.binomial(x * 8, HALF[0]), "aten.binomial"),
    "gamma": (torch._standard_gamma, "aten._standard_gamma"),
    "dirichlet": (torch._sample_dirichlet, "aten._sample_dirichlet"),
    "randperm": (lambda x: torch.randperm(9), "aten.randperm"),
    "cauchy": (lambda x: torch.empty(3).cauchy_(), "aten.cauchy"),
    "geometric": (lambda x: torch.empty(3).geometric_(0.5), "aten.geometric"),
    "log_normal": (lambda x: torch.empty(3).log_normal_(), "aten.log_normal"),
    "randint_like": (lambda x: torch.randint_like(x, 9), "aten.randint_like"),
    "rrelu": (lambda x: nn.functional.rrelu(x, training=True), "aten.rrelu"),
    "attention with dropout": (
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        "dropout 0.5 is random",
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_no_kernel_computes_is_refused_by_name(name: str) -> None:
    function, message = FUNCTIONS[name]
    with pytest.raises((MissingKernelError, UnsupportedError), match=message):
        emit(torch.export.export(Of(function).train(), (SQUARE,)))


def _adds(low: Tensor, high: Tensor, *, writes: bool = True) -> Of:
    """Return a module that returns what a write to one buffer shows in another."""

    def forward(self: Any, x: Tensor) -> Any:
        if writes:
            self.low.add_(x)
        return self.high * 2 + self.low

    return Of(forward, low=low, high=high)


def test_a_write_that_another_buffer_shows_in_part_is_refused_by_both_names() -> None:
    memory = torch.zeros(8)
    with pytest.raises(UnsupportedError, match=r"'low' and 'high' overlap.*'add_'"):
        emit(exported(_adds(memory[:6], memory[2:]), torch.ones(6)))


class Dequantizes(nn.Module):
    """A layer whose weight is stored as integers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("integers", torch.ones(8, 4, dtype=torch.int8))
        self.register_buffer("scales", torch.rand(8))
        self.register_buffer("zeros", torch.zeros(8, dtype=torch.int64))

    def forward(self, x: Tensor) -> Any:
        args = (*self.buffers(), 0, -128, 127, torch.int8)
        weight = qd.dequantize_per_channel(*args)
        rounded = nn.functional.linear(x, weight)
        return qd.quantize_per_tensor(rounded, 0.1, 0, -128, 127, torch.int8)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("scales", torch.rand(7)),
        ("scales", torch.rand(8).double()),
        ("zeros", torch.zeros(8, dtype=torch.int8)),
        ("zeros", torch.zeros(16, dtype=torch.int64)),
        ("integers", torch.ones(8, 5, dtype=torch.int8)),
    ],
)
def test_a_constant_of_another_kind_than_was_exported_is_refused(
    name: str, tensor: Tensor
) -> None:
    program = exported(Dequantizes(), torch.ones(2, 4))
    program.state_dict[name] = tensor
    message = rf"found .* for '{name}', which .*dequantize_per_channel.* reads; expected"
    with pytest.raises(UnsupportedError, match=message):
        emit(program)


@pytest.mark.parametrize(("place", "value"), [(3, -129), (4, 300)])
def test_integers_beyond_their_type_are_refused_with_the_node(place: int, value: int) -> None:
    program = exported(Dequantizes(), torch.ones(2, 4))
    (node,) = (one for one in program.graph.nodes if ".quantize_per" in str(one.target))
    node.update_arg(place, value)
    with pytest.raises(EmitterError, match=r"quantize_per_tensor.*found integers of .*int8 holds"):
        emit(program)


class Named(nn.Module):
    """Has a line of this file for what a function does in the zoo's."""

    def forward(self, x: Tensor) -> Any:
        y = x.to(torch.float32)
        return torch.linalg.cholesky(torch.linalg.inv(y))


@pytest.mark.parametrize(
    ("x", "names"),
    [
        (torch.eye(3), ["linalg_inv", "linalg_cholesky"]),
        (torch.eye(3).to(torch.float8_e4m3fn), ["_to_copy", "linalg_inv", "linalg_cholesky"]),
    ],
)
def test_every_missing_kernel_is_named_with_its_line(x: Tensor, names: list[str]) -> None:
    with pytest.raises(MissingKernelError) as caught:
        emit(exported(Named(), x))
    assert len(names) == len(caught.value.missing)
    for name, item in zip(names, caught.value.missing, strict=True):
        assert name in item.operator
        assert "test_refusals.py" in item.sources[0]
    assert ("not support float8" in str(caught.value)) == (len(names) == 3)


def test_floats_of_8_bits_that_need_no_kernel_are_emitted() -> None:
    halved = Of(lambda x: x[:2].view(-1))
    assert emit(exported(halved, torch.ones(4, 2).to(torch.float8_e5m2))).to_bytes()


def test_constants_of_a_subclass_that_holds_other_tensors_are_refused() -> None:
    two: Any = TwoTensor
    holder = _adds(two(torch.ones(6), torch.ones(6)), torch.ones(6), writes=False)
    with pytest.raises(UnsupportedError, match="TwoTensor"):
        emit(exported(holder, torch.ones(6)))


def _program(size: Any = None) -> torch.export.ExportedProgram:
    return exported(nn.ReLU(), torch.ones(4, 2), dynamic_shapes=size and ({0: size},))


class Scales(nn.Module):
    def forward(self, x: Tensor, n: int) -> Tensor:
        return x * n


@pytest.mark.parametrize(
    ("given", "config", "message"),
    [
        (dict, None, "no method"),
        (nn.ReLU, None, r"call torch\.export\.export first"),
        (_program, EmitConfig(constant_methods={"forward": 1}), "rename"),
        (_program, {"plan_inputs": False}, "found a dict, expected an EmitConfig"),
        (
            lambda: exported(Scales(), SQUARE, 3, dynamic_shapes=(None, Dim.DYNAMIC)),
            None,
            "0-dim tensor",
        ),
        (lambda: _program(Dim("rows")), None, r'Dim\("rows", max='),
    ],
)
def test_wrong_arguments_are_refused(given: Callable[[], Any], config: Any, message: str) -> None:
    with pytest.raises((EmitterError, UnboundedSizeError), match=message):
        emit(given(), config=config)


def test_a_program_in_the_edge_dialect_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.export.ExportedProgram, "dialect", "EDGE")
    with pytest.raises(EmitterError, match=r"Edge dialect.*omit to_edge"):
        emit(_program())


def test_an_operator_without_an_out_variant_is_named_before_a_missing_bound() -> None:
    def fake(x: Tensor) -> Tensor:
        return x.new_empty(torch.library.get_ctx().new_dynamic_size())

    with torch.library._scoped_library("test_refusals", "FRAGMENT") as library:
        library.define("pick(Tensor x) -> Tensor")
        library.impl("pick", lambda x: x[:2].clone(), "CPU")
        torch.library.register_fake("test_refusals::pick", fake, lib=library)
        program = exported(Of(lambda x: torch.ops.test_refusals.pick(x) * 2), torch.ones(5))
        with pytest.raises(MissingKernelError, match=r"register one \(test_refusals::pick\.out\)"):
            emit(program)


def test_a_decomposition_that_fixes_a_dynamic_dimension_is_refused() -> None:
    def fixing(x: Tensor, approximate: str = "none") -> Tensor:
        return x * int(x.shape[0])

    rows: Any = (({0: Dim("rows", min=2, max=8)},),)
    program = exported(Of(nn.functional.gelu), torch.ones(4, 2), dynamic_shapes=rows)
    config = EmitConfig(decompositions={torch.ops.aten.gelu.default: fixing})
    with pytest.raises(EmitterError, match=r"specialized dimension 0 of input .* to 4"):
        emit(program, config=config)
