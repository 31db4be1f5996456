"""What this package expects of what is private in torch; a new torch that differs fails here."""

from __future__ import annotations

import numpy
import torch
from torch.export import export
from torch.fx import Graph

from lowerdeck.unflatten import _torch_private as private


def test_lazy_clones_share_memory_until_one_is_written() -> None:
    tensor = torch.ones(4)
    copy = private.lazy_clone(tensor)
    assert private.is_copy_on_write(copy)
    copy.add_(1)
    assert not private.is_copy_on_write(copy)
    assert tensor.eq(1).all()
    assert copy.eq(2).all()


def test_memory_of_others_is_copied_at_once() -> None:
    tensor = torch.from_numpy(numpy.ones(3))
    copy = private.lazy_clone(tensor)
    assert not private.is_copy_on_write(copy)
    assert private.storage_key(copy) != private.storage_key(tensor)


def test_views_have_one_storage_key() -> None:
    tensor = torch.ones(4)
    assert private.storage_key(tensor) == private.storage_key(tensor[1:])


def test_a_node_is_added_as_torch_adds_it() -> None:
    fast, plain = Graph(), Graph()
    for graph in (fast, plain):
        x = graph.placeholder("x")
        for _ in range(2):
            if graph is fast:
                x = private.add_node(graph, "call_function", torch.relu, (x,), {}, "relu")
            else:
                x = graph.create_node("call_function", torch.relu, (x,), {}, "relu")
        graph.output(x)
        graph.lint()
    assert str(fast) == str(plain)
    assert len(fast.nodes) == len(plain.nodes)
    assert len(fast.find_nodes(op="call_function", target=torch.relu)) == 2


def test_mode_regions_carry_their_mode_and_body() -> None:
    class Modes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = x + 1
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x @ y

    program = export(Modes(), (torch.ones(2, 2),))
    targets = {node.target for node in program.graph.nodes}
    assert {private.GRAD_MODE_REGION, private.AUTOCAST_REGION} <= targets


def test_a_program_without_tokens_is_not_copied() -> None:
    program = export(torch.nn.ReLU(), (torch.ones(2),))
    assert private.without_effect_tokens(program) is program
