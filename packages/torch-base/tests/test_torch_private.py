"""What we expect of torch's private parts; a new torch that breaks it breaks one of these."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowerdeck.torch_base import _torch_private as private
from lowerdeck.torch_base import bytes_of


def test_norms_of_batches_and_instances_have_one_base() -> None:
    for norm in (torch.nn.BatchNorm1d(1), torch.nn.InstanceNorm3d(1), torch.nn.SyncBatchNorm(1)):
        assert isinstance(norm, private.NormBase)
    assert not isinstance(torch.nn.LayerNorm(1), private.NormBase)


def test_operators_have_kinds_and_overloads_a_schema() -> None:
    add = torch.ops.aten.add
    assert isinstance(add.Tensor, private.OpOverload)
    assert isinstance(add, private.OpOverloadPacket)
    assert isinstance(torch.ops.higher_order.cond, private.HigherOrderOperator)
    schema = private.schema_of(torch.ops.aten.add_.Tensor)
    assert schema.name == "aten::add_"
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    assert written == [True, False, False]


def test_composite_operators_are_told_from_true_views() -> None:
    aten = torch.ops.aten
    assert private.is_composite(aten.reshape.default)
    assert private.is_composite(aten.contiguous.default)
    assert not private.is_composite(aten.view.default)
    assert not private.is_composite(aten.select.int)
    # It is known to TorchScript only.
    assert private.is_composite(aten.einsum.sublist)


def test_an_impure_module_is_known() -> None:
    module = torch.nn.Module()
    assert not private.is_impure(module)
    module._is_impure = True  # type: ignore[assignment]
    assert private.is_impure(module)


def test_a_storage_is_known_by_its_own_identity() -> None:
    whole = torch.zeros(4)
    assert private.storage_identity(whole) == private.storage_identity(whole[2:])
    assert private.storage_identity(whole) != private.storage_identity(torch.zeros(4))
    assert private.storage_identity(torch.zeros(4).to_sparse()) is None


def test_reading_a_lazy_clone_does_not_copy_it() -> None:
    tensor = torch.arange(12.0)
    clone = torch._lazy_clone(tensor)
    assert bytes(bytes_of(clone)) == bytes(bytes_of(tensor))
    assert private.data_address(clone) == private.data_address(tensor)
    assert private.data_address(tensor[3:]) == private.data_address(tensor) + 12


def test_the_address_of_a_storage_is_told_without_writing() -> None:
    whole = torch.zeros(4)
    assert private.storage_address(whole[2:]) == whole.data_ptr()
    lazy = torch._lazy_clone(whole)
    assert private.storage_address(lazy) == private.storage_address(whole), "it still shares"
    assert private.storage_address(torch.zeros(4, device="meta")) == 0
    assert private.storage_address(torch.zeros(4).to_sparse()) == 0


def test_a_negative_view_shares_memory() -> None:
    tensor = torch.ones(2)
    view = private.negative_view(tensor)
    tensor.mul_(3)
    assert view.eq(-3).all()


def test_values_under_a_fake_mode_are_fake() -> None:
    with FakeTensorMode():
        assert isinstance(torch.zeros(2), private.FakeTensor)


def test_a_composite_is_taken_apart_as_eager_does_it() -> None:
    x = torch.ones(2)
    parts = private.composite_parts(torch.ops.aten.type_as.default)
    assert parts is not None
    assert parts(x, x) is x
    assert private.composite_parts(torch.ops.aten.add.Tensor) is None


def test_a_program_can_be_given_another_graph() -> None:
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    other = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    made = private.with_graph_module(program, other)
    assert made.graph_module is other
    assert program.graph_module is not other
    assert made.state_dict is program.state_dict


def test_memory_is_shared_until_it_is_written_where_torch_can_replace_it() -> None:
    tensor = torch.ones(4)
    copy = private.shared_copy(tensor)
    assert copy is not None
    assert torch._C._is_cow_tensor(copy)  # type: ignore[attr-defined]
    copy.add_(1)
    assert tensor.eq(1).all()
    assert copy.eq(2).all()
    assert private.shared_copy(torch.frombuffer(bytearray(8), dtype=torch.float32)) is None
    assert private.shared_copy(torch.eye(2).to_sparse()) is None


def test_upper_bounds_come_from_the_range_or_the_example() -> None:
    sizes = []
    for top in (16, None):
        batch = torch.export.Dim("batch", min=1, max=top) if top else torch.export.Dim("batch")
        program = torch.export.export(
            torch.nn.Linear(2, 2), (torch.ones(3, 2),), dynamic_shapes=({0: batch},)
        )
        node = next(one for one in program.graph.nodes if one.op == "call_function")
        sizes.append([private.upper_bound(size) for size in node.meta["val"].shape])
    assert sizes == [[16, 2], [3, 2]]
