"""create_submodule_from_nodes beside ExecuTorch's, on exported programs."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch.fx import GraphModule, Node

from lowerdeck.graph_fuser import create_submodule_from_nodes, validate_partition

theirs = pytest.importorskip("executorch.exir.lowered_backend_module")

pytestmark = pytest.mark.filterwarnings("ignore")


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = self.first(x).relu()
        b = self.second(y).sigmoid() * a
        parts = torch.split(b, 2, dim=1)
        return torch.cat([parts[1], parts[0]], dim=1) + x, a.sum() - y


INPUTS = (torch.randn(3, 4), torch.randn(3, 4))


def program() -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    return torch.export.export(Branches(), INPUTS).run_decompositions()


def arguments(exported: torch.export.ExportedProgram) -> list[torch.Tensor]:
    state = exported.state_dict
    lifted = exported.graph_signature.inputs_to_parameters.values()
    return [*(state[name] for name in lifted), *INPUTS]


def pick(gm: GraphModule, names: list[str]) -> list[Node]:
    n = {node.name: node for node in gm.graph.nodes}
    return [n[name] for name in names]


def flow(graph: torch.fx.Graph) -> list[str]:
    """Return what each node computes, whatever the order of the nodes."""
    text: dict[Node, str] = {}
    for node in graph.nodes:
        args = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: text[n])
        target = node.name if node.op == "placeholder" else str(node.target)
        text[node] = str(hash((node.op, target, str(args))))
    return sorted(text.values())


@pytest.mark.parametrize("seed", range(20))
def test_the_same_submodule_and_the_same_numbers(seed: int) -> None:
    exported = program()
    ours, peers = exported.graph_module, copy.deepcopy(exported.graph_module)
    expected = ours(*arguments(exported))
    rng = random.Random(seed)
    names = [node.name for node in ours.graph.nodes if node.op == "call_function"]
    start = rng.randrange(len(names))
    chosen = names[start : start + rng.randint(1, 6)]
    if not validate_partition(pick(ours, chosen)):
        with pytest.raises(AssertionError):
            theirs.create_submodule_from_nodes(peers, pick(peers, chosen), "t")
        return
    module, call = create_submodule_from_nodes(
        ours, pick(ours, chosen), "t", input_order="first_use"
    )
    peer_module, peer_call = theirs.create_submodule_from_nodes(peers, pick(peers, chosen), "t")
    assert call.target == peer_call.target == "fused_t"
    assert [node.name for node in call.args] == [node.name for node in peer_call.args]
    assert flow(module.graph) == flow(peer_module.graph)
    assert flow(ours.graph) == flow(peers.graph)
    for value, wanted in zip(ours(*arguments(exported)), expected, strict=True):
        torch.testing.assert_close(value, wanted)


def test_a_lone_list_is_opened_as_there() -> None:
    exported = program()
    ours, peers = exported.graph_module, copy.deepcopy(exported.graph_module)
    expected = ours(*arguments(exported))
    split = next(node for node in ours.graph.nodes if "split" in node.name)
    module, call = create_submodule_from_nodes(ours, [split], "t")
    peer_module, peer_call = theirs.create_submodule_from_nodes(
        peers, pick(peers, [split.name]), "t"
    )
    assert flow(module.graph) == flow(peer_module.graph)
    assert flow(ours.graph) == flow(peers.graph)
    assert len(call.users) == len(peer_call.users) == 2
    for value, wanted in zip(ours(*arguments(exported)), expected, strict=True):
        torch.testing.assert_close(value, wanted)
