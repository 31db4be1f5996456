"""What is expected of the private parts of torch that this package uses."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from lowerdeck.runner import _torch_private as private


def test_overloads_are_found_by_name() -> None:
    assert private.find_overload("aten", "add", "out") is torch.ops.aten.add.out
    assert private.find_overload("aten", "copy_", "") is torch.ops.aten.copy_.default
    assert private.find_overload("aten", "add", "no_such") is None
    assert private.find_overload("aten", "no_such", "out") is None
    assert private.find_overload("no_such", "add", "out") is None
    assert private.find_overload("aten", "__class__", "out") is None


def test_operators_are_named_by_their_schema() -> None:
    assert private.operator_name(torch.ops.aten.add.out) == "aten::add"
    assert private.operator_name(len) is None


def test_a_dispatch_mode_sees_every_operator_and_what_it_returns() -> None:
    seen: list[str | None] = []

    class Watch(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(private.operator_name(func))
            return func(*args, **(kwargs or {}))

    with Watch():  # type: ignore[no-untyped-call]
        (torch.ones(2) + 1).relu()
    assert seen == ["aten::ones", "aten::add", "aten::relu"]


def test_schemas_tell_types_and_what_is_written() -> None:
    found = private.schema_arguments(torch.ops.aten.split_with_sizes_copy.out)
    assert [(a.name, a.type) for a in found] == [
        ("self", "Tensor"),
        ("split_sizes", "List[int]"),
        ("dim", "int"),
        ("out", "List[Tensor]"),
    ]
    assert [a.is_out for a in found] == [False, False, False, True]
    assert [a.keyword_only for a in found] == [False, False, False, True]
    assert found[2] == private.SchemaArgument("dim", "int", False, False, False)
    in_place = private.schema_arguments(torch.ops.aten.copy_.default)[0]
    assert (in_place.is_written, in_place.is_out) == (True, False)
    types = {a.name: a.type for a in private.schema_arguments(torch.ops.aten.sum.IntList_out)}
    assert types["dtype"] == "Optional[ScalarType]"
    assert types["dim"] == "Optional[List[int]]"
    types = {a.name: a.type for a in private.schema_arguments(torch.ops.aten.index.Tensor_out)}
    assert types["indices"] == "List[Optional[Tensor]]"


@pytest.mark.parametrize("name", ["add", "relu", "mul", "gelu", "where", "clamp", "exp"])
def test_elementwise_operators_are_known(name: str) -> None:
    assert private.is_pointwise("aten", name)


@pytest.mark.parametrize("name", ["mm", "convolution", "cat", "_softmax", "permute_copy"])
def test_other_operators_are_not_elementwise(name: str) -> None:
    assert not private.is_pointwise("aten", name)


def test_the_direct_call_is_the_operator() -> None:
    out = torch.empty(2)
    private.direct_call(torch.ops.aten.add.out)(torch.ones(2), torch.ones(2), out=out)
    assert out.tolist() == [2.0, 2.0]


def test_trees_are_read_flattened_named_and_rebuilt() -> None:
    tree = ((torch.ones(1), [2]), {"k": (3,)})
    spec = private.structure_of(tree)
    assert spec == pytree.tree_structure(tree)
    leaves = private.flatten_like(tree, spec)
    assert leaves is not None
    assert leaves[1:] == [2, 3]
    assert private.flatten_like(((1, [2, 3]), {"k": (3,)}), spec) is None
    assert private.leaf_paths(spec) == ["[0][0]", "[0][1][0]", "[1]['k'][0]"]
    assert private.unflatten([1, 2, 3], spec) == ((1, [2]), {"k": (3,)})
    assert private.leaves(tree)[1:] == [2, 3]


def test_registered_named_tuples_are_found_by_their_name_in_files() -> None:
    pair = namedtuple("pair", ["left", "right"])
    assert private.registered_named_tuple("torch_private_tests.pair") is None
    pytree._register_namedtuple(pair, serialized_type_name="torch_private_tests.pair")
    assert private.registered_named_tuple("torch_private_tests.pair") is pair
    for other in ("torch.Size", "builtins.tuple", "collections.namedtuple", "os.path"):
        assert private.registered_named_tuple(other) is None


def test_an_exported_program_gives_the_inputs_of_its_graph() -> None:
    exported = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),))
    flat = private.flat_graph_inputs(exported, (torch.ones(1, 2),), {})
    assert [tuple(value.shape) for value in flat] == [(3, 2), (3,), (1, 2)]


def test_an_empty_out_is_resized_in_place_and_silently() -> None:
    arena = torch.zeros(64, dtype=torch.uint8)
    with torch.inference_mode():
        out = torch.empty(0).set_(arena.untyped_storage(), 4, (2,), (1,))
        out.resize_(0)
        torch.ops.aten.add.out(torch.ones(3), torch.ones(3), out=out)
    assert out.untyped_storage().data_ptr() == arena.untyped_storage().data_ptr()
    assert arena.view(torch.float32)[4:7].tolist() == [2.0] * 3
