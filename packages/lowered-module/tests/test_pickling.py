"""What ``lower`` and ``to_backend`` return, pickled: control flow and all."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import ExportedProgram

from lowerdeck.decompose import decompose
from lowerdeck.lowered_module import Partitioner, lower, to_backend
from lowerdeck.lowered_module.testing import RunPartitioner, TaggingPartitioner
from lowerdeck.torch_base import graphs_of


def _branch(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y.exp(), (x,))


def _nested(x: Tensor) -> Any:
    return torch.cond(x.max() > 1, _branch, lambda y: y - 1, (x,)) + 1


def _loop(x: Tensor) -> Any:
    return torch.while_loop(  # type: ignore[no-untyped-call]
        lambda count, _: count < 3, lambda count, y: (count + 1, y * 2), (torch.tensor(0), x)
    )


def _straight(x: Tensor) -> Any:
    return torch.cat(torch.chunk(x, 2), 1).tanh(), {"more": x.max(-1)[0]}


def _without_gradients(x: Tensor) -> Any:
    with torch.no_grad():
        y = x + 1
    return y * 2


class _Model(torch.nn.Module):
    state: Tensor

    def __init__(self, call: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.call = call
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("state", torch.zeros(3))

    def forward(self, input: Tensor) -> Any:  # noqa: A002  (a name that torch.fx gives no node)
        self.state.add_(1)
        return self.call(self.linear(input) + self.state)


_CALLS = [_branch, _nested, _loop, _straight, _without_gradients]


def _program(call: Callable[[Tensor], Any]) -> ExportedProgram:
    return torch.export.export(_Model(call).requires_grad_(False), (torch.ones(2, 3),))


@pytest.mark.parametrize("call", _CALLS)
@pytest.mark.parametrize(
    "partitioner",
    [
        None,
        RunPartitioner(lambda node: "cond" not in str(node.target)),
        RunPartitioner(lambda node: "linear" in str(node.target) or "mm" in str(node.target)),
    ],
    ids=["no backend", "runs", "one"],
)
def test_what_lower_returns_is_the_same_after_pickle_and_copies(
    call: Callable[[Tensor], Any], partitioner: Partitioner | None
) -> None:
    lowered = lower(_program(call), partitioner)
    once = pickle.loads(pickle.dumps(lowered))
    twice = pickle.loads(pickle.dumps(once))
    for again in (once, twice, copy.deepcopy(lowered), copy.copy(lowered)):
        assert type(again) is type(lowered)
        assert again.to_bytes() == lowered.to_bytes()
        assert str(again.delegation()) == str(lowered.delegation())
    for again in (once, twice):
        before, after = lowered.programs["forward"], again.programs["forward"]
        assert after.graph_signature == before.graph_signature
        for mine, other in zip(
            graphs_of(before.graph_module), graphs_of(after.graph_module), strict=True
        ):
            assert str(other.graph) == str(mine.graph)
            assert other.code == mine.code
            other.graph.lint()


@pytest.mark.parametrize("call", _CALLS)
def test_delegates_with_control_flow_run_after_pickle(call: Callable[[Tensor], Any]) -> None:
    delegate = to_backend("VerbatimBackend", decompose(_program(call)), [])
    x = torch.randn(2, 3)
    with torch.no_grad():
        again, copied = pickle.loads(pickle.dumps(delegate)), copy.deepcopy(delegate)
        wanted = delegate(x)
        torch.testing.assert_close(again(x), wanted)
        torch.testing.assert_close(copied(x), wanted)
        torch.testing.assert_close(again(x), delegate(x))
    assert str(again.original_module.graph) == str(delegate.original_module.graph)


def test_another_process_can_read_what_was_lowered(tmp_path: Path) -> None:
    lowered = lower(_program(_nested), TaggingPartitioner(lambda _: None))
    (tmp_path / "lowered").write_bytes(pickle.dumps(lowered))
    code = (
        "import pickle, sys; lowered = pickle.load(open('lowered', 'rb'));"
        "lowered.save('model.pte')"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=tmp_path)
    assert (tmp_path / "model.pte").read_bytes() == lowered.to_bytes()
