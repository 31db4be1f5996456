"""What no input of a program changes is computed ahead of time for declarative backends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node

from lowerdeck.lowered_module import (
    DeclarativeBackend,
    PartitionView,
    SupportedOp,
    TablePartitioner,
    get_lowered_backend_modules,
    known_nodes,
    mode_stretches,
    read_by_one,
    register_backend,
    to_backend,
    unregister_backend,
    visits,
)
from lowerdeck.torch_base import Behaviours


class Held(DeclarativeBackend):
    """Adds and multiplies floats, and writes down the constants that it is given."""

    supported: ClassVar[tuple[SupportedOp, ...]] = (
        SupportedOp("aten.add.Tensor", {torch.float32}),
        SupportedOp("aten.mul.Tensor", {torch.float32}),
    )
    shared: ClassVar[list[bool]] = []

    def begin_partition(self, part: PartitionView) -> None:
        weights = {one.untyped_storage()._cdata for one in part.program.state_dict.values()}
        self.shared.extend(
            one.untyped_storage()._cdata in weights for one in part.constants.values()
        )

    @visits("aten.add.Tensor", "aten.mul.Tensor")
    def elementwise(self, part: PartitionView, node: Node) -> None:
        part.emit(node.name)

    def compile(self, part: PartitionView) -> bytes:
        held = [f"{node.op} {one.sum().item():g}" for node, one in part.constants.items()]
        return "; ".join([*part.instructions, *held]).encode()


@pytest.fixture(autouse=True)
def backend() -> Any:
    register_backend(Held)
    Held.shared.clear()
    yield
    unregister_backend("Held")


class Of(nn.Module):
    weight: Tensor
    wide: Tensor
    count: Tensor

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("weight", torch.ones(4, 4))
        self.register_buffer("wide", torch.ones(1200, 1200))
        self.register_buffer("count", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def exported(function: Callable[..., Any], **options: Any) -> ExportedProgram:
    return torch.export.export(Of(function), (torch.ones(4, 4),), **options)


def blobs(program: ExportedProgram, partitioner: Any = None, **options: Any) -> list[str]:
    lowered = to_backend(program, partitioner or Held.partitioner(), **options)
    found = get_lowered_backend_modules(lowered.graph_module)
    x = torch.arange(16.0).reshape(4, 4)
    torch.testing.assert_close(lowered.module()(x), program.module()(x))
    return [one.processed_bytes.decode() for one in found]


def masked(_: Of, x: Tensor) -> Tensor:
    rows = torch.arange(4).unsqueeze(1)
    mask = ((rows > 0) & (rows < 3) & (torch.arange(4) < 2)).to(torch.float32)
    return (x + torch.zeros(4, 4).masked_fill(mask != 0, 1.0)) * 3.0


@pytest.mark.parametrize("decomposed", [True, False])
def test_a_mask_is_a_constant_of_one_partition(decomposed: bool) -> None:
    program = exported(masked)
    program = program.run_decompositions() if decomposed else program
    (found,) = blobs(program)
    assert found.startswith("add; mul")
    assert "call_function 4" in found


def test_it_crosses_to_other_processes() -> None:
    with ProcessPoolExecutor(1) as pool:
        (found,) = blobs(exported(masked), executor=pool)
    assert "call_function 4" in found


def test_a_table_that_is_not_a_declarative_backends_gets_what_it_names() -> None:
    (found,) = blobs(exported(masked), TablePartitioner("Held", Held.supported))
    assert "call_function" not in found


def test_what_two_partitions_read_is_in_neither() -> None:
    def twice(_: Of, x: Tensor) -> Tensor:
        mask = torch.arange(4).eq(2).float()
        return (x + mask).sin() + mask

    found = blobs(exported(twice))
    assert len(found) == 2
    assert not any("call_function" in one for one in found)


@pytest.mark.parametrize("within", [False, True])
def test_what_is_read_in_another_mode_is_computed_in_its_own(within: bool) -> None:
    def moded(self: Of, x: Tensor) -> Tensor:
        mask = torch.arange(4).eq(2).float()
        # A branch in a mode lets export write the mode's calls out.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x + mask if within else x
            y = torch.cond(x.sum() > 0, torch.sin, torch.cos, (y,))
            y = y * self.weight
        result: Tensor = y if within else y + mask
        return result

    program = exported(moded)
    assert any("enter_autocast" in str(node.target) for node in program.graph.nodes)
    found = blobs(program)
    assert found
    assert not any("call_function" in one for one in found)
    behaviours = Behaviours(program.graph_module)
    stretches = mode_stretches(program.graph.nodes, behaviours)
    known = known_nodes(program.graph.nodes, ())
    (reader,) = (user for user in known[-1].users if user not in known)
    assert stretches[known[-1]] < stretches[reader]
    assert read_by_one(known, [[reader]]) == known
    assert read_by_one(known, [[reader]], stretches) == []


def test_what_is_returned_stays_with_the_program() -> None:
    def both(_: Of, x: Tensor) -> Any:
        mask = torch.arange(4).eq(2).float()
        return x + mask, mask

    (found,) = blobs(exported(both))
    assert "call_function" not in found


def test_random_numbers_and_state_are_left() -> None:
    def drawn(self: Of, x: Tensor) -> Any:
        self.count.add_(1)
        noise = torch.rand(4, 4)
        return x + noise * 0, x + self.count.eq(1).float()

    program = exported(drawn)
    lowered = to_backend(program, Held.partitioner())
    for one in get_lowered_backend_modules(lowered.graph_module):
        assert "call_function" not in one.processed_bytes.decode()


def test_a_dynamic_size_is_left() -> None:
    def positions(_: Of, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[0]).unsqueeze(1).float() + torch.arange(4).eq(2).float()

    found = blobs(exported(positions, dynamic_shapes=({0: Dim("rows", max=8)},)))
    assert sum("call_function 1" in one for one in found) == 1
    assert not any("call_function 6" in one for one in found)


def test_what_the_table_takes_is_visited() -> None:
    def scaled(self: Of, x: Tensor) -> Tensor:
        return x + self.weight * 2.0

    (found,) = blobs(exported(scaled))
    assert found == "mul; add; placeholder 16"


def test_weights_are_not_copied() -> None:
    def turned(self: Of, x: Tensor) -> Tensor:
        return x + self.wide.t()[:4, :4] + self.wide.sin()[:4, :4]

    found = blobs(exported(turned))
    # The view is one of what is there; 5.8 MB of sines are not computed ahead.
    assert sum("call_function 16" in one for one in found) == 1
    assert Held.shared == [True]


def test_partitions_of_nothing_else_are_none() -> None:
    def alone(_: Of, x: Tensor) -> Tensor:
        return x.sin() * torch.arange(4).eq(2).float()

    partitioner = TablePartitioner("Held", Held.supported, min_nodes=2, computes_ahead=True)
    assert blobs(exported(alone), partitioner) == []
    assert "fewer than 2" in " ".join(partitioner.refused.values())


def test_marks_of_an_earlier_choice_are_forgotten() -> None:
    program = exported(masked).run_decompositions()
    Held.partitioner().partition(program)
    assert any("lowerdeck.ahead" in node.meta for node in program.graph.nodes)
    TablePartitioner("Held", Held.supported).partition(program)
    assert not any("lowerdeck.ahead" in node.meta for node in program.graph.nodes)


def test_one_of_several_values_is_computed_ahead_with_its_producer() -> None:
    def halves(_: Of, x: Tensor) -> Tensor:
        low, high = torch.arange(8.0).chunk(2)
        return (x + high) * low

    assert [one for one in blobs(exported(halves)) if "call_function 22" in one]
