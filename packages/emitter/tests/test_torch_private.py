"""What this package expects of torch's unpromised parts; a new torch breaks here first."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.export import Dim, export
from torch.fx.experimental.proxy_tensor import make_fx

from lowerdeck.decompose import Rules, decompose_graph
from lowerdeck.emitter import _torch_private as private
from lowerdeck.emitter.ir.kernels import OFFICIAL_KERNELS
from lowerdeck.emitter.ir.overloads import out_variant
from lowerdeck.torch_base import expression_of

ATEN = torch.ops.aten


def rows_of(size: Any) -> Any:
    """Return the number of rows of an input, which varies."""
    program = export(torch.nn.ReLU(), (torch.ones(4, 2),), dynamic_shapes=({0: size},))
    return next(iter(program.graph.nodes)).meta["val"].shape[0]


def test_what_is_known_needs_no_guard() -> None:
    assert private.is_known(3 > 2)
    assert not private.is_known(2 > 3)
    size = rows_of(Dim("rows", min=2, max=9))
    assert private.is_known(size >= 2)
    assert not private.is_known(size >= 3)
    assert not private.is_known(size < 3)


def test_importing_the_package_does_not_load_sympy() -> None:
    code = "import sys, lowerdeck.emitter; print('sympy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "False"


def test_dimensions_have_the_names_that_the_user_gave() -> None:
    size = rows_of(Dim("rows", max=7))
    assert private.dimension_names(size) == {str(expression_of(size)): "rows"}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (ATEN.add.Tensor, "aten::add.out"),
        (ATEN.add.Scalar, "aten::add.Scalar_out"),
        (ATEN.view.default, "aten::view_copy.out"),
        (ATEN.permute.default, "aten::permute_copy.out"),
        (ATEN.select.int, "aten::select_copy.int_out"),
        (ATEN.slice.Tensor, "aten::slice_copy.Tensor_out"),
        (ATEN.split_with_sizes.default, "aten::split_with_sizes_copy.out"),
        (ATEN.full.default, "aten::full.out"),
        (ATEN.arange.start_step, "aten::arange.start_out"),
        (ATEN.max.dim, "aten::max.dim_max"),
        (ATEN.topk.default, "aten::topk.values"),
        (ATEN._to_copy.default, "aten::_to_copy.out"),
        (ATEN.pow.Tensor_Scalar, "aten::pow.Tensor_Scalar_out"),
        (ATEN.native_layer_norm.default, "aten::native_layer_norm.out"),
    ],
)
def test_out_variants_are_found_by_schema(target: torch._ops.OpOverload, expected: str) -> None:
    variant = out_variant(target)
    assert variant is not None
    assert variant.full_name == expected
    assert expected in OFFICIAL_KERNELS


def test_a_rule_can_ask_what_the_node_gave_before() -> None:
    asked: list[tuple[int, ...]] = []

    def rule(*_: object) -> object:
        asked.append(private.current_result().shape)
        return NotImplemented

    exported = export(torch.nn.ReLU(), (torch.ones(3, 2),))
    decompose_graph(exported, Rules({ATEN.relu.default: rule}, {}, by_result=True))
    assert asked == [(3, 2)]
    assert private.current_result() is None


def test_sizes_of_another_trace_can_be_compared_while_tracing() -> None:
    size = rows_of(Dim("rows", max=7))

    def compared(x: torch.Tensor) -> torch.Tensor:
        with private.untraced():
            assert not private.is_known(size + 1 == 1)
        return x + 1

    assert make_fx(compared)(torch.ones(1)).graph
    with pytest.raises(RuntimeError, match="not tracked with proxy"):
        make_fx(lambda x: x + int(private.is_known(size + 1 == 1)))(torch.ones(1))


def test_shapes_of_symbols_are_inferred_without_guards() -> None:
    rows = Dim("rows", max=7)
    exported = export(torch.nn.ReLU(), (torch.ones(4, 2),), dynamic_shapes=({0: rows},))
    value = next(iter(exported.graph.nodes)).meta["val"]
    with private.inferring_shapes(value.fake_mode):
        padded = torch.nn.functional.pad(value, (0, 0, 1, 1))
        assert bool(padded.shape[0] == 6)
    assert str(padded.shape[0]) == f"{value.shape[0]} + 2"
    with private.inferring_shapes(None):
        assert torch.ones(2).relu().shape == (2,)
