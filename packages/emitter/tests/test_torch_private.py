"""What this package expects of torch's unpromised parts; a new torch breaks here first."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim, export

from lowerdeck.emitter import _torch_private as private
from lowerdeck.emitter.kernels import OFFICIAL_KERNELS
from lowerdeck.emitter.overloads import copying_name, out_variant

ATEN = torch.ops.aten


def test_schemas_of_all_overloads_are_found() -> None:
    names = {schema.overload_name for schema in private.operator_schemas("aten::add")}
    assert {"Tensor", "Scalar", "out"} <= names


def test_a_bound_comes_from_the_dimension() -> None:
    exported = export(
        torch.nn.ReLU(), (torch.ones(4, 2),), dynamic_shapes=({0: Dim("rows", max=7)},)
    )
    size = next(iter(exported.graph.nodes)).meta["val"].shape[0]
    assert private.upper_bound(size) == 7
    assert private.upper_bound(size * 2 + 1) == 15
    assert private.dimension_names(size) == {str(size.node.expr): "rows"}


def test_no_bound_is_none() -> None:
    exported = export(torch.nn.ReLU(), (torch.ones(4),), dynamic_shapes=({0: Dim("rows")},))
    assert private.upper_bound(next(iter(exported.graph.nodes)).meta["val"].shape[0]) is None


def test_composite_operators_are_told_apart() -> None:
    assert private.is_composite(ATEN.linear.default)
    assert not private.is_composite(ATEN.mm.default)


def test_a_retrace_takes_apart_and_keeps_what_it_is_told() -> None:
    exported = export(torch.nn.Linear(2, 3), (torch.ones(1, 2),))
    rules = private.core_decompositions()
    kept = private.retrace(exported, rules, {ATEN.linear.default: lambda *_: NotImplemented})
    gone = private.retrace(exported, rules, {})
    targets = [[n.target for n in e.graph.nodes if n.op == "call_function"] for e in (kept, gone)]
    assert targets[0] == [ATEN.linear.default]
    assert ATEN.linear.default not in targets[1]
    assert ATEN.addmm.default in targets[1]


def test_delegates_are_called_by_torchs_operator() -> None:
    assert private.is_delegate_call(private.call_delegate_operator())
    assert not private.is_delegate_call(ATEN.add.Tensor)


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


def test_almost_all_of_core_aten_has_an_out_variant() -> None:
    core = [
        overload
        for name in dir(ATEN)
        if isinstance(packet := getattr(ATEN, name), torch._ops.OpOverloadPacket)
        for overload in (getattr(packet, o) for o in dir(packet) if not o.startswith("_"))
        if isinstance(overload, torch._ops.OpOverload)
        if torch.Tag.core in overload.tags
    ]
    without = {str(target) for target in core if out_variant(target) is None}
    numbers = {
        "aten._local_scalar_dense.default",
        "aten.sym_is_contiguous.default",
        "aten.sym_numel.default",
        "aten.sym_size.int",
        "aten.sym_storage_offset.default",
        "aten.sym_stride.int",
    }
    assert len(core) > 180
    assert len(without - numbers) <= 3, without


def test_operators_that_do_not_alias_keep_their_name() -> None:
    assert copying_name("aten::add") == "aten::add"
    assert copying_name("mylib::view") == "mylib::view"
