"""Who owns parameters, buffers and constants, and that none is copied."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

from lowerdeck.lowered_module import (
    DelegationSpec,
    OwnershipError,
    PartitionResult,
    get_lowered_backend_modules,
    tag_constant_data,
    tag_mutated_buffer,
    to_backend,
)
from lowerdeck.lowered_module.testing import TaggingPartitioner
from lowerdeck.torch_base import MemoryUse


def export(module: torch.nn.Module, *inputs: Any) -> ExportedProgram:
    with torch.no_grad():
        return torch.export.export(module.eval(), inputs).run_decompositions()  # type: ignore[no-any-return]


def lower(program: ExportedProgram, tags: dict[str, str], **options: Any) -> ExportedProgram:
    """Lower the named nodes; the tags of placeholders are set by hand where they are named."""

    def partition(tagged: ExportedProgram) -> PartitionResult:
        partitioner = TaggingPartitioner(lambda node: tags.get(node.name), **options)
        result = partitioner.partition(tagged)
        for node in tagged.graph.find_nodes(op="placeholder"):
            if node.name in tags:
                node.meta["delegation_tag"] = tags[node.name]
        return result

    lowered = to_backend(program, partition)
    lowered.validate()  # type: ignore[no-untyped-call]
    for delegate in get_lowered_backend_modules(lowered.graph_module):
        delegate.original_module.validate()  # type: ignore[no-untyped-call]
    return lowered


def behaves(module: torch.nn.Module, lowered: ExportedProgram, *inputs: Any) -> None:
    eager, found = copy.deepcopy(module), lowered.module()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(found(*inputs), eager(*inputs))


def calls(program: ExportedProgram) -> dict[str, str]:
    return {n.name: "all" for n in program.graph.nodes if n.op == "call_function"}


class Shared(torch.nn.Module):
    """One weight that is read twice, in a list, and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, 2))
        self.register_buffer("unused", torch.ones(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = x + self.weight
        second = torch.cat([first, self.weight, self.weight])
        return second.sin(), self.weight


def test_constants_are_owned_and_not_copied() -> None:
    module = torch.nn.Linear(3, 3)
    program = export(module, torch.ones(1, 3))
    lowered = lower(program, calls(program))
    (delegate,) = get_lowered_backend_modules(lowered.graph_module)
    owned = delegate.original_module.state_dict
    assert sorted(owned) == ["bias", "weight"]
    for name, value in owned.items():
        assert value is program.state_dict[name]
    assert not lowered.state_dict
    assert [spec.kind.name for spec in lowered.graph_signature.input_specs] == ["USER_INPUT"]


def test_untagged_constants_are_passed() -> None:
    program = export(torch.nn.Linear(3, 3), torch.ones(1, 3))
    lowered = lower(program, calls(program), constants=False)
    (delegate,) = get_lowered_backend_modules(lowered.graph_module)
    assert not delegate.original_module.state_dict
    assert sorted(lowered.state_dict) == ["bias", "weight"]


def test_a_constant_shared_by_partitions_and_the_program_is_owned_once_by_each() -> None:
    module = Shared()
    program = export(module, torch.ones(2, 2))
    lowered = lower(program, {"add": "a", "cat": "b"})
    first, second = get_lowered_backend_modules(lowered.graph_module)
    weight = program.state_dict["weight"]
    for delegate in (first, second):
        assert delegate.original_module.state_dict["weight"] is weight
    assert lowered.state_dict["weight"] is weight
    assert [spec.target for spec in first.original_module.graph_signature.input_specs].count(
        "weight"
    ) == 1
    behaves(module, lowered, torch.ones(2, 2))


def test_a_constant_read_only_inside_leaves_the_program() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(2, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([(x + self.weight).sin(), self.weight]) * 2

    module = Model()
    program = export(module, torch.ones(2, 2))
    lowered = lower(program, {"add": "a", "cat": "b"})
    assert not lowered.state_dict
    behaves(module, lowered, torch.ones(2, 2))


def test_a_constant_read_by_a_branch_is_owned_and_kept() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(2, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + self.weight
            return torch.cond(  # type: ignore[no-any-return]
                x.sum() > 0, lambda y, w: y * w, lambda y, w: y - w, (y, self.weight.clone())
            )

    module = Model()
    program = export(module, torch.ones(2, 2))
    lowered = lower(program, {"add": "a"})
    (delegate,) = get_lowered_backend_modules(lowered.graph_module)
    assert list(delegate.original_module.state_dict) == ["weight"]
    assert list(lowered.state_dict) == ["weight"]
    behaves(module, lowered, torch.ones(2, 2))


def test_unused_constants_go_along_so_that_nothing_dangles() -> None:
    program = export(Shared(), torch.ones(2, 2))
    lowered = lower(program, calls(program))
    (delegate,) = get_lowered_backend_modules(lowered.graph_module)
    assert "unused" in delegate.original_module.state_dict
    assert list(lowered.state_dict) == ["weight"]


def test_lifted_constants_are_owned() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tensor([1.0, 2.0])

    program = export(Model(), torch.ones(2))
    lowered = lower(program, calls(program))
    (delegate,) = get_lowered_backend_modules(lowered.graph_module)
    assert len(delegate.original_module.constants) == 1
    assert not lowered.constants
    behaves(Model(), lowered, torch.ones(2))


def test_tied_weights_leave_no_second_name() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Linear(2, 2, bias=False)
            self.two = torch.nn.Linear(2, 2, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.two(self.one(x))
            return result

    program = export(Model(), torch.ones(1, 2))
    lowered = lower(program, calls(program))
    assert not lowered.state_dict


def test_no_copy_forbids_a_second_owner() -> None:
    program = export(Shared(), torch.ones(2, 2))

    def partition(tagged: ExportedProgram) -> PartitionResult:
        for node in tagged.graph.nodes:
            if node.name in ("add", "p_weight"):
                node.meta["delegation_tag"] = "a"
            node.meta["no_copy"] = True
        return PartitionResult(tagged, {"a": DelegationSpec("VerbatimBackend", [])})

    with pytest.raises(OwnershipError, match=r"with \(a\) but has user .* \(None\).* no_copy"):
        to_backend(program, partition)


class Counter(torch.nn.Module):
    """A buffer that is read, changed, returned, and read once more."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = self.count * 2
        self.count.add_(x)
        return x.sin() * self.count, before, self.count.clone()


def test_state_moves_into_the_delegate_that_changes_it() -> None:
    program = export(Counter(), torch.ones(2))
    lowered = lower(program, calls(program))
    (delegate,) = get_lowered_backend_modules(lowered.graph_module)
    assert list(delegate.original_module.state_dict) == ["count"]
    assert delegate.original_module.graph_signature.buffers_to_mutate
    assert not lowered.state_dict
    assert not lowered.graph_signature.buffers_to_mutate
    behaves(Counter(), lowered, torch.ones(2))


def test_new_state_may_be_returned_and_read_by_the_program() -> None:
    program = export(Counter(), torch.ones(2))
    update = next(iter(program.graph_signature.buffers_to_mutate))
    lowered = lower(program, {update: "t", "mul": "t"})
    assert not lowered.state_dict
    behaves(Counter(), lowered, torch.ones(2))


def test_old_state_read_by_the_program_is_returned_by_its_owner() -> None:
    program = export(Counter(), torch.ones(2))
    update = next(iter(program.graph_signature.buffers_to_mutate))
    lowered = lower(program, {update: "t", "b_count": "t"})
    assert not lowered.state_dict
    behaves(Counter(), lowered, torch.ones(2))


def test_old_views_of_state_are_returned_as_copies_by_its_owner() -> None:
    class Model(torch.nn.Module):
        row: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("row", torch.ones(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            first, second = self.row.split(2)  # type: ignore[no-untyped-call]
            tail = self.row[1:]
            read = first.sin() + second, tail.cos()
            self.row.add_(x)
            return read

    program = export(Model(), torch.ones(4))
    update = next(iter(program.graph_signature.buffers_to_mutate))
    views = {
        name: "t" for name in calls(program) if name.startswith(("split", "getitem", "slice"))
    }
    lowered = lower(program, {**views, update: "t", "b_row": "t"})
    (delegate,) = get_lowered_backend_modules(lowered.graph_module)
    inner = delegate.original_module
    memory = MemoryUse.of_program(inner)
    (state,) = [node for node in inner.graph.nodes if node.name == "b_row"]
    returned = inner.graph.output_node().args[0]
    assert len(returned) == 4
    assert not [value for value in returned if memory.group(value) is memory.group(state)]
    behaves(Model(), lowered, torch.ones(4))


def test_untagged_state_stays_with_the_program() -> None:
    program = export(Counter(), torch.ones(2))
    lowered = lower(program, calls(program), state=False)
    assert list(lowered.state_dict) == ["count"]
    assert lowered.graph_signature.buffers_to_mutate
    behaves(Counter(), lowered, torch.ones(2))


def test_a_buffer_that_is_only_written_is_owned_too() -> None:
    class Model(torch.nn.Module):
        last: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last.copy_(x * 3)
            return x + 1

    program = export(Model(), torch.ones(2))
    lowered = lower(program, calls(program))
    (delegate,) = get_lowered_backend_modules(lowered.graph_module)
    found = lowered.module()
    found(torch.ones(2))
    (state,) = delegate.original_module.state_dict.values()
    assert torch.equal(state, torch.full((2,), 3.0))


def test_running_the_lowered_program_leaves_the_original_alone() -> None:
    for state in (True, False):
        program = export(Counter(), torch.ones(2))
        lower(program, calls(program), state=state).module()(torch.ones(2))
        assert torch.equal(program.state_dict["count"], torch.zeros(2))


def test_state_whose_new_value_is_computed_elsewhere_cannot_move() -> None:
    program = export(Counter(), torch.ones(2))
    with pytest.raises(OwnershipError, match=r"new value .* is computed"):
        lower(program, {"mul": "t", "b_count": "t"})


def test_helpers_tag_what_partitions_read_and_change() -> None:
    program = export(Counter(), torch.ones(2))
    for node in program.graph.nodes:
        if node.op == "call_function":
            node.meta["delegation_tag"] = "b"
    tag_constant_data(program)
    (buffer, _) = program.graph.find_nodes(op="placeholder")
    assert "delegation_tag" not in buffer.meta
    tag_mutated_buffer(program)
    assert buffer.meta["delegation_tag"] == "b"


def test_weights_take_no_more_memory_while_lowering() -> None:
    storages: list[set[int]] = []

    class Peeks(TaggingPartitioner):
        def partition(self, exported_program: ExportedProgram) -> PartitionResult:
            weights = exported_program.state_dict.values()
            storages.append({int(type(value).__name__ == "FakeTensor") for value in weights})
            return super().partition(exported_program)

    program = export(torch.nn.Linear(3, 3), torch.ones(1, 3))
    to_backend(program, Peeks(lambda _: "t"))
    # The partitioner saw shapes, not values, and no storage of the program was duplicated.
    assert storages == [{1}]
