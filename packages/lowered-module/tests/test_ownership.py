"""Who owns parameters, buffers and constants, and that none is copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lowered_helpers import assert_behaves, calls_of, core, delegates, everything
from torch import Tensor, nn
from torch.export import ExportedProgram

from lowerdeck.lowered_module import (
    DelegationSpec,
    OwnershipError,
    PartitionResult,
    constant_names,
    constant_tensors,
    tag_constant_data,
    tag_mutated_buffer,
    to_backend,
)
from lowerdeck.lowered_module.testing import TaggingPartitioner
from lowerdeck.torch_base import MemoryUse
from lowerdeck_zoo import Holding, exported


def lowered_by(program: ExportedProgram, tags: dict[str, str], **options: Any) -> ExportedProgram:
    """Lower the named nodes; "calls" names all calls, and placeholders are tagged by hand."""
    if "calls" in tags:
        tags = tags | {node.name: tags["calls"] for node in calls_of(program)}

    def partition(tagged: ExportedProgram) -> PartitionResult:
        result = TaggingPartitioner(lambda node: tags.get(node.name), **options).partition(tagged)
        for node in tagged.graph.find_nodes(op="placeholder"):
            if node.name in tags:
                node.meta["delegation_tag"] = tags[node.name]
        return result

    lowered = to_backend(program, partition)
    for one in (lowered, *(delegate.original_module for delegate in delegates(lowered))):
        one.validate()  # type: ignore[no-untyped-call]
    return lowered


class Weighted(Holding, weight=lambda: nn.Parameter(torch.randn(2, 2))):
    """Has a weight."""


class Shared(Weighted, unused=lambda: torch.ones(3)):
    """A weight that is read twice, in a list, and returned; a buffer that is not read."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = x + self.weight
        return torch.cat([first, self.weight, self.weight]).sin(), self.weight


class Inside(Weighted):
    """A weight that two partitions read."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([(x + self.weight).sin(), self.weight]) * 2


class Branching(Weighted):
    """A weight that a branch reads."""

    def forward(self, x: Tensor) -> Any:
        y = x + self.weight
        return torch.cond(
            x.sum() > 0, lambda y, w: y * w, lambda y, w: y - w, (y, self.weight.clone())
        )


class Lifted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tensor([1.0, 2.0])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2, bias=False)
        self.two = nn.Linear(2, 2, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Any:
        return self.two(self.one(x))


class Counter(Holding, count=lambda: torch.zeros(2)):
    """A buffer that is read, changed, returned, and read once more."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        before = self.count * 2
        self.count.add_(x)
        return x.sin() * self.count, before, self.count.clone()


class Rows(Holding, row=lambda: torch.ones(4)):
    """Views of a buffer that are read before it changes."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first, second = self.row.split(2)
        tail = self.row[1:]
        read = first.sin() + second, tail.cos()
        self.row.add_(x)
        return read


class Last(Holding, last=lambda: torch.zeros(2)):
    """A buffer that is only written."""

    def forward(self, x: Tensor) -> Tensor:
        self.last.copy_(x * 3)
        return x + 1


# "new" stands for the node with the new value of the buffer. Then: names that each delegate
# owns, and names that stay with the program.
CASES: dict[str, Any] = {
    "all": (nn.Linear(2, 2), {"calls": "t"}, {}, [{"weight", "bias"}], set()),
    "untagged": (
        *(nn.Linear(2, 2), {"calls": "t"}, {"constants": False}),
        *([set()], {"weight", "bias"}),
    ),
    "two partitions and the program": (
        *(Shared(), {"add": "a", "cat": "b"}, {}),
        *([{"weight", "unused"}, {"weight"}], {"weight"}),
    ),
    "two partitions": (
        *(Inside(), {"add": "a", "cat": "b"}, {}),
        *([{"weight"}, {"weight"}], set()),
    ),
    "a branch": (Branching(), {"add": "a"}, {}, [{"weight"}], {"weight"}),
    "unused go along": (Shared(), {"calls": "t"}, {}, [{"weight", "unused"}], {"weight"}),
    "lifted": (Lifted(), {"calls": "t"}, {}, [{"lifted"}], set()),
    "tied": (Tied(), {"calls": "t"}, {}, [{"one.weight", "two.weight"}], set()),
    "state": (Counter(), {"calls": "t"}, {}, [{"count"}], set()),
    "new state is read outside": (Counter(), {"new": "t", "mul": "t"}, {}, [{"count"}], set()),
    "old state is read outside": (Counter(), {"new": "t", "b_count": "t"}, {}, [{"count"}], set()),
    "untagged state": (Counter(), {"calls": "t"}, {"state": False}, [set()], {"count"}),
    "only written": (Last(), {"calls": "t"}, {}, [{"last"}], set()),
}


@pytest.mark.parametrize("name", CASES)
def test_owners_and_numbers(name: str) -> None:
    module, tags, options, owned, left = CASES[name]
    x = torch.ones(2) if isinstance(module, Lifted | Counter | Last) else torch.ones(2, 2)
    program = core(module, x)
    if "new" in tags:
        tags = {**tags, next(iter(program.graph_signature.buffers_to_mutate)): "t"}
    before = {key: value.clone() for key, value in program.state_dict.items()}
    lowered = lowered_by(program, tags, **options)
    inner = [delegate.original_module for delegate in delegates(lowered)]
    assert [{"lifted"} if one.constants else set(one.state_dict) for one in inner] == owned
    assert set(lowered.state_dict) == left
    assert not lowered.constants
    assert bool(lowered.graph_signature.buffers_to_mutate) == (name == "untagged state")
    for one in inner:
        targets = [spec.target for spec in one.graph_signature.input_specs if spec.target]
        assert len(targets) == len(set(targets))
        for key in one.state_dict.keys() - one.graph_signature.buffers_to_mutate.values():
            assert one.state_dict[key] is program.state_dict[key]
    assert_behaves(lowered, module, x)
    # Running the lowered program leaves the original alone.
    for key, value in before.items():
        assert torch.equal(program.state_dict[key], value)


def test_old_views_of_state_are_returned_as_copies_by_its_owner() -> None:
    program = core(Rows(), torch.ones(4))
    update = next(iter(program.graph_signature.buffers_to_mutate))
    names = [node.name for node in calls_of(program)]
    views = {name: "t" for name in names if name.startswith(("split", "getitem", "slice"))}
    lowered = lowered_by(program, {**views, update: "t", "b_row": "t"})
    (delegate,) = delegates(lowered)
    inner = delegate.original_module
    memory = MemoryUse.of_program(inner)
    (state,) = [node for node in inner.graph.nodes if node.name == "b_row"]
    returned = inner.graph.output_node().args[0]
    assert len(returned) == 4
    assert not [value for value in returned if memory.group(value) is memory.group(state)]
    assert_behaves(lowered, Rows(), torch.ones(4))


def test_what_cannot_move_is_refused() -> None:
    with pytest.raises(OwnershipError, match=r"new value .* is computed"):
        lowered_by(core(Counter(), torch.ones(2)), {"mul": "t", "b_count": "t"})

    def no_copies(tagged: ExportedProgram) -> PartitionResult:
        for node in tagged.graph.nodes:
            if node.name in ("add", "p_weight"):
                node.meta["delegation_tag"] = "a"
            node.meta["no_copy"] = True
        return PartitionResult(tagged, {"a": DelegationSpec("VerbatimBackend", [])})

    with pytest.raises(OwnershipError, match=r"with \(a\) but has user .* \(None\).* no_copy"):
        to_backend(core(Shared(), torch.ones(2, 2)), no_copies)


def test_helpers_tag_what_partitions_read_and_change() -> None:
    program = core(Counter(), torch.ones(2))
    for node in calls_of(program):
        node.meta["delegation_tag"] = "b"
    tag_constant_data(program)
    (buffer, _) = program.graph.find_nodes(op="placeholder")
    assert "delegation_tag" not in buffer.meta
    tag_mutated_buffer(program)
    assert buffer.meta["delegation_tag"] == "b"


def test_partitioners_see_shapes_and_no_weights() -> None:
    kinds: set[str] = set()

    def peek(program: ExportedProgram) -> PartitionResult:
        kinds.update(type(value).__name__ for value in program.state_dict.values())
        return everything()(program)

    to_backend(core(nn.Linear(3, 3), torch.ones(1, 3)), peek)
    assert kinds == {"FakeTensor"}


class Mixed(
    Holding,
    weight=lambda: nn.Parameter(torch.full((2,), 3.0)),
    still=lambda: torch.ones(2),
    written=lambda: torch.zeros(4, 2),
):
    """A parameter, a constant buffer, one that is written through a view, and a lifted tensor."""

    def forward(self, x: Tensor) -> Any:
        self.written[1].add_(x)
        # A tensor that a write in place to another one reads stays a constant.
        return (self.weight * x).add_(self.still) + torch.tensor([5.0, 6.0])


def test_what_a_run_writes_is_no_constant_before_and_after_functionalisation() -> None:
    raw = exported(Mixed(), torch.ones(2))
    for program in (raw, raw.run_decompositions({})):
        names, tensors = constant_names(program), constant_tensors(program)
        assert tensors.keys() == names.keys()
        by_target = {names[name]: tensor for name, tensor in tensors.items()}
        (lifted,) = by_target.keys() - {"weight", "still"}
        assert torch.equal(by_target["weight"], torch.full((2,), 3.0))
        assert not by_target["weight"].requires_grad
        assert torch.equal(by_target[lifted], torch.tensor([5.0, 6.0]))
