"""What no input of a program changes is computed ahead of time for declarative backends."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from lowered_helpers import delegates
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx import Interpreter, Node

from lowerdeck.lowered_module import (
    DeclarativeBackend,
    NodePartitioner,
    PartitionView,
    foldable_nodes,
    mode_stretches,
    read_by_one,
    to_backend,
    visits,
)
from lowerdeck.lowered_module.program.masks import infer_fact
from lowerdeck.torch_base import Behaviours
from lowerdeck_zoo import Of, exported


class Held(DeclarativeBackend):
    """Adds and multiplies floats, and writes down the constants that it is given."""

    shared: ClassVar[list[bool]] = []

    def begin_partition(self, part: PartitionView) -> None:
        weights = {one.untyped_storage()._cdata for one in part.program.state_dict.values()}
        self.shared.extend(
            one.untyped_storage()._cdata in weights for one in part.constants.values()
        )

    @visits("aten.add.Tensor", "aten.mul.Tensor", dtypes={torch.float32})
    def elementwise(self, part: PartitionView, node: Node) -> None:
        part.emit(node.name)

    def compile(self, part: PartitionView) -> bytes:
        held = [f"{node.op} {one.sum().item():g}" for node, one in part.constants.items()]
        return "; ".join([*part.instructions, *held]).encode()


class Plain(NodePartitioner):
    """Takes what the backend visits, and what is computed ahead where it is told to."""

    def objection(self, node: Node) -> str | None:
        return Held.partitioner().objection(node)


@pytest.fixture(autouse=True)
def backend() -> None:
    Held.shared.clear()


def program_of(function: Callable[..., Any], **options: Any) -> ExportedProgram:
    held = {"weight": torch.ones(4, 4), "wide": torch.ones(1200, 1200)}
    module = Of(function, **held, count=torch.zeros(4, 4))  # which is written
    return exported(module, torch.ones(4, 4), **options)


def blobs(program: ExportedProgram, partitioner: Any = None, **options: Any) -> list[str]:
    lowered = to_backend(program, partitioner or Held.partitioner(), **options)
    x = torch.arange(16.0).reshape(4, 4)
    torch.testing.assert_close(lowered.module()(x), program.module()(x))
    return [one.processed_bytes.decode() for one in delegates(lowered)]


def masked(_: Any, x: Tensor) -> Tensor:
    rows = torch.arange(4).unsqueeze(1)
    mask = ((rows > 0) & (rows < 3) & (torch.arange(4) < 2)).to(torch.float32)
    return (x + torch.zeros(4, 4).masked_fill(mask != 0, 1.0)) * 3.0


def twice(_: Any, x: Tensor) -> Tensor:
    mask = torch.arange(4).eq(2).float()
    return (x + mask).sin() + mask


def returned(_: Any, x: Tensor) -> Any:
    mask = torch.arange(4).eq(2).float()
    return x + mask, mask


def positions(_: Any, x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[0]).unsqueeze(1).float() + torch.arange(4).eq(2).float()


def halves(_: Any, x: Tensor) -> Tensor:
    low, high = torch.arange(8.0).chunk(2)
    return (x + high) * low


DYNAMIC = {"dynamic_shapes": (({0: Dim("rows", max=8)},),)}
# The sums of the values that partitions hold computed ahead of time.
AHEAD: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "a mask": (masked, {}, ["4"]),
    "read by two partitions": (twice, {}, []),
    "returned, too": (returned, {}, []),
    "a dynamic size is left": (positions, DYNAMIC, ["1"]),
    "in the table, so visited": (lambda self, x: x + self.weight * 2.0, {}, []),
    "one of several values": (halves, {}, ["22", "6"]),
}


@pytest.mark.parametrize("decomposed", [True, False])
@pytest.mark.parametrize("case", AHEAD)
def test_what_is_computed_ahead(case: str, decomposed: bool) -> None:
    function, options, sums = AHEAD[case]
    program = program_of(function, **options)
    found = " ".join(blobs(program.run_decompositions() if decomposed else program))
    assert sorted(re.findall(r"call_function (\d+)", found)) == sorted(sums)
    if case == "a mask":
        assert found.startswith("add; mul")
        # Nothing is computed ahead for others.
        (found,) = blobs(program, Plain("Held"))
        assert "call_function" not in found


def test_it_crosses_to_other_processes() -> None:
    with ProcessPoolExecutor(1) as pool:
        (found,) = blobs(program_of(masked), executor=pool)
    assert "call_function 4" in found


@pytest.mark.parametrize("within", [False, True])
def test_what_is_read_in_another_mode_is_computed_in_its_own(within: bool) -> None:
    def moded(self: Any, x: Tensor) -> Tensor:
        mask = torch.arange(4).eq(2).float()
        # A branch in a mode lets export write the mode's calls out.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x + mask if within else x
            y = torch.cond(x.sum() > 0, torch.sin, torch.cos, (y,))
            y = y * self.weight
        result: Tensor = y if within else y + mask
        return result

    program = program_of(moded)
    assert any("enter_autocast" in str(node.target) for node in program.graph.nodes)
    found = blobs(program)
    assert found
    assert not any("call_function" in one for one in found)
    behaviours = Behaviours(program.graph_module)
    stretches = mode_stretches(program.graph.nodes, behaviours)
    known = foldable_nodes(program.graph.nodes, ())
    (reader,) = (user for user in known[-1].users if user not in known)
    assert stretches[known[-1]] < stretches[reader]
    assert read_by_one(known, [[reader]]) == known
    assert read_by_one(known, [[reader]], stretches) == []


def test_random_numbers_and_state_are_left() -> None:
    def drawn(self: Any, x: Tensor) -> Any:
        self.count.add_(1)
        noise = torch.rand(4, 4)
        return x + noise * 0, x + self.count.eq(1).float()

    program = program_of(drawn)
    lowered = to_backend(program, Held.partitioner())
    for one in delegates(lowered):
        assert "call_function" not in one.processed_bytes.decode()


def test_weights_are_not_copied() -> None:
    def turned(self: Any, x: Tensor) -> Any:
        return x + self.wide.t()[:4, :4] + self.wide.sin()[:4, :4]

    found = blobs(program_of(turned))
    # The view is one of what is there; 5.8 MB of sines are not computed ahead.
    assert sum("call_function 16" in one for one in found) == 1
    assert Held.shared == [True]


def test_standardized_weights_of_any_size_are_computed_ahead() -> None:
    def standardized(self: Any, x: Tensor) -> Tensor:
        rows = self.weight.view(1, 2048, -1)
        weight = torch.nn.functional.batch_norm(rows, None, None, training=True)
        return torch.nn.functional.conv2d(x, weight.view_as(self.weight))

    # The batch norm returns means and deviations with the 4.2 MB.
    model = Of(standardized, weight=torch.ones(2048, 513, 1, 1))
    program = exported(model, torch.ones(1, 513, 1, 1)).run_decompositions()
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    assert foldable_nodes(calls, {"b_weight"}) == calls[:-1]


def test_partitions_of_nothing_else_are_none() -> None:
    def alone(_: Any, x: Tensor) -> Tensor:
        return x.sin() * torch.arange(4).eq(2).float()

    partitioner = Plain("Held", min_nodes=2, computes_ahead=True)
    assert blobs(program_of(alone), partitioner) == []
    assert "fewer than 2" in " ".join(partitioner.refused.values())


def test_marks_of_an_earlier_choice_are_forgotten() -> None:
    program = program_of(masked).run_decompositions()
    Held.partitioner().partition(program)
    assert any("lowerdeck.ahead" in node.meta for node in program.graph.nodes)
    Plain("Held").partition(program)
    assert not any("lowerdeck.ahead" in node.meta for node in program.graph.nodes)


class Kept(Interpreter):
    """Keeps the result of each call."""

    def run_node(self, n: Node) -> Any:
        self.kept = {**getattr(self, "kept", {}), n: super().run_node(n)}
        return self.kept[n]


def lines(x: Tensor) -> tuple[Tensor, ...]:
    n = x.shape[0]
    ahead, back = torch.arange(3, n + 3), torch.arange(0, -2 * n, -2)
    rows = ahead[None].expand(2, -1)
    packed = torch.diff(rows, prepend=rows[:, :1] - 1, dim=-1) != 1
    falling = torch.cat([back[:1] + 2, back])
    return (
        *(packed.cumsum(-1), falling[1:] - falling[:-1], ahead + back, ahead - ahead[:, None]),
        *(ahead >= 3, back > 0, back < 1, ahead + back <= 3, back == -2, rows[..., 1::2] - 1),
        *(rows.unsqueeze(1) == ahead, (torch.ones(n, dtype=torch.int64) + 1).cumsum(0)),
        *(ahead.to(torch.bool).long(), (ahead > 0) + (ahead >= 3)),
        *((ahead > 0) & (back <= 0), ahead[-1:], ahead.view(1, -1, 1), rows[:1].expand(4, -1)),
    )


@pytest.mark.parametrize("decomposed", [False, True])
def test_positions_are_the_lines_that_masks_are_simplified_by(decomposed: bool) -> None:
    sizes = (({0: Dim.AUTO},),)
    program = torch.export.export(Of(lines).eval(), (torch.ones(5),), dynamic_shapes=sizes)
    program = program.run_decompositions() if decomposed else program
    facts: dict[Node, Any] = {}
    for node in program.graph.nodes:
        facts[node] = infer_fact(node, facts) if node.op == "call_function" else None
    known = {node: line for node, line in facts.items() if line is not None}
    assert len(known) >= 36
    for n in (0, 1, 2, 3, 6):
        run = Kept(program.graph_module)
        run.run(torch.ones(n))
        for node, line in known.items():
            value = run.kept[node].long()
            wanted = line.first + line.step * torch.arange(value.size(line.axis))
            wanted = wanted.view(-1, *[1] * (-1 - line.axis)).expand_as(value)
            assert torch.equal(value, wanted), (node, n)
