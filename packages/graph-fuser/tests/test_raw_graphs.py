"""Proposals on graphs straight from ``torch.export``, which are not functional."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node, symbolic_trace
from torch.utils import _pytree as pytree

from lowerdeck.graph_fuser import fuse_partitions, propose_partitions, validate_partition
from lowerdeck.torch_base import is_getitem
from lowerdeck_zoo import Of, Program, assert_close, copied, exported, programs

pytestmark = pytest.mark.filterwarnings("ignore")
WRITING = programs("stateful", "in-place", "modes", without="large")


def run(gm: GraphModule, program: ExportedProgram) -> tuple[Any, list[Any]]:
    """Return the outputs on the example inputs, and all inputs after the call."""
    args = iter(pytree.tree_leaves(program.example_inputs))
    held = {**program.state_dict, **program.constants}
    inputs = [
        next(args) if spec.target is None else held[spec.target]
        for spec in program.graph_signature.input_specs
    ]
    inputs = pytree.tree_map_only(torch.Tensor, lambda value: value.detach().clone(), inputs)
    torch.manual_seed(0)
    with torch.no_grad():
        return gm(*inputs), inputs


def check(
    gm: GraphModule, program: ExportedProgram, supported: Callable[[Node], bool], seed: int
) -> None:
    """Fuse what is proposed, and compare all numbers."""
    expected, rng = run(gm, program), random.Random(seed)
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    groups = [rng.sample(nodes, k=2)] if len(nodes) > 3 and seed % 3 == 0 else []
    proposal = propose_partitions(gm, supported, groups=groups, min_nodes=rng.randrange(3))
    fuse_partitions(gm, proposal.named())
    gm.graph.lint()
    assert_close(run(gm, program), expected, atol=0, rtol=0)


def writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("program", WRITING, ids=str)
def test_programs_with_views_and_writes_fuse_as_proposed(program: Program, seed: int) -> None:
    rng = random.Random(f"{program}{seed}")
    # What writes is often what a backend refuses; sometimes anything is.
    copy = copied(program.export())
    refused = {node for node in copy.graph.nodes if (rng.random() < 0.2 if seed else writes(node))}
    check(copy.graph_module, copy, lambda node: node not in refused, rng.randrange(99))


def _split(x: Any) -> Any:
    parts = (x + 1).split(2)
    parts[0].add_(1)
    return parts[1] * 2


@pytest.mark.parametrize("trace", [symbolic_trace, lambda f: exported(Of(f), torch.ones(4))])
def test_an_element_taken_after_a_write_stays_with_its_tuple(trace: Any) -> None:
    gm = getattr(trace(_split), "graph_module", trace(_split))
    proposal = propose_partitions(gm, lambda node: "add_" not in str(node.target))
    partition_of = {node: number for number, part in enumerate(proposal) for node in part}
    elements = [node for node in gm.graph.nodes if is_getitem(node)]
    assert {partition_of[node] for node in elements} == {partition_of[elements[0].args[0]]}
    fuse_partitions(gm, proposal.named())
    (found,) = pytree.tree_leaves(gm(torch.arange(4.0)))
    assert found.tolist() == [6, 8]


def test_a_part_of_a_tensor_read_after_a_write_leaves_its_producer() -> None:
    def model(x: Any) -> Any:
        y = x + 1
        y[0].add_(1)
        return y[torch.tensor([0, 1])]

    gm = symbolic_trace(model)
    fuse_partitions(gm, propose_partitions(gm, lambda node: node.target != "add_").named())
    assert gm(torch.zeros(3)).tolist() == [2, 1]


def test_elements_taken_under_another_mode_stay_with_their_tuple() -> None:
    def model(x: Any) -> Any:
        first, second = (x + 1).split(2)
        with torch.autocast("cpu"):
            third = first.sin()
        return third + second

    program = exported(Of(model), torch.ones(4))
    check(program.graph_module, program, lambda _: True, 0)


def test_readers_that_export_forgot_are_known() -> None:
    def model(x: Any) -> Any:
        first, second = (x + 1).chunk(2, 1)
        with torch.no_grad():
            third = first * 2
        rows = torch.cat([third, second], 1)
        rows[1:3] = x[0]
        return rows

    x = torch.arange(16.0).view(4, 4)
    gm = exported(Of(model), x).graph_module
    n = {node.name: node for node in gm.graph.nodes}
    assert not validate_partition([n["cat"], n["copy_"]])
    fuse_partitions(gm, {"p": [n["cat"]]})
    torch.testing.assert_close(gm(x)[0], model(x))
