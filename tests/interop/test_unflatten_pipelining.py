"""Pipelines of ``torch.distributed.pipelining`` built from unflattened modules, on one machine.

What is shown: an unflattened module splits as the eager one does, at the same names, with the same
state in each stage; a ``pipe_split`` in the model stays where it is; stages unflatten again; a
schedule runs a stage with gloo in a group of one process.

What cannot be shown here: ``_IR.Pipe`` calls private helpers of ``torch.export.unflatten``
(``_outline_submodules``, ``_sink_params``) on graphs of its own, which no public hook lets us
replace; and stages on several hosts or GPUs, which need more than one machine.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import export

from lowerdeck.unflatten import export_preserving, unflatten

distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("this torch comes without gloo", allow_module_level=True)
pipelining = pytest.importorskip("torch.distributed.pipelining")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.fc = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> Any:
        return x + self.fc(self.norm(x)).relu() * self.scale


class Net(nn.Module):
    def __init__(self, *, splits: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(8, 3)
        self.splits = splits

    def forward(self, x: Tensor) -> Any:
        for index, layer in enumerate(self.layers):
            if self.splits and index == 2:
                pipelining.pipe_split()
            x = layer(x)
        return self.head(x)


X = torch.randn(4, 8)


def _value(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _state_of(pipe: Any) -> list[list[str]]:
    return [list(pipe.get_stage_module(stage).state_dict()) for stage in range(pipe.num_stages)]


def test_an_unflattened_module_splits_as_the_eager_one() -> None:
    eager = Net(splits=False)
    points = {"layers.2": pipelining.SplitPoint.BEGINNING}
    # Splitting wraps the forward of the module where it splits.
    expected = pipelining.pipeline(copy.deepcopy(eager), (X,), split_spec=points)
    module = unflatten(export_preserving(eager, (X,)))
    found = pipelining.pipeline(module, (X,), split_spec=points)
    assert found.num_stages == 2
    assert _state_of(found) == _state_of(expected)
    torch.testing.assert_close(_value(found(X)), eager(X))


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield
    distributed.destroy_process_group()


def test_a_schedule_runs_an_unflattened_stage(group: None) -> None:
    eager, device = Net(splits=False), torch.device("cpu")
    part = X[:2]
    module = unflatten(export(eager, (part,)))
    by_hand = pipelining.PipelineStage(module, 0, 1, device)
    traced = pipelining.pipeline(module, (part,)).build_stage(0, device)
    for stage in (by_hand, traced):
        found = pipelining.ScheduleGPipe(stage, n_microbatches=2).step(X)
        torch.testing.assert_close(_value(found), eager(X))


def test_a_schedule_trains_an_unflattened_stage(group: None) -> None:
    eager = Net(splits=False)
    module = unflatten(export(eager, (X[:2],)))
    stage = pipelining.PipelineStage(module, 0, 1, torch.device("cpu"))
    target = torch.randn(4, 3)
    schedule = pipelining.ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.MSELoss())
    losses: list[Tensor] = []
    schedule.step(X, target=target, losses=losses)
    nn.functional.mse_loss(eager(X), target).backward()  # type: ignore[no-untyped-call]
    for name, value in eager.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad, value.grad)
