"""Programs whose tensors lie on a GPU; none is needed but for the last test."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from on_another_device import on_cuda  # type: ignore[import-not-found]
from program_likeness import differences  # type: ignore[import-not-found]
from torch import nn
from torch.export import ExportedProgram

from lowerdeck.decompose import (
    DecomposeError,
    DecompositionCache,
    decompose,
    devices,
    explain,
    methods_on_cpu,
    on_cpu,
)
from lowerdeck.decompose._torch_private import fake_mode_of
from lowerdeck.decompose.calls.facts import TensorFacts
from lowerdeck.torch_base import graphs_of, pytree, storage_identity
from lowerdeck_zoo import Of, exported

F = nn.functional


def calls(body: Callable[..., Any]) -> Of:
    return Of(body, linear=nn.Linear(4, 4), total=torch.zeros(4, 4))


def _makes_constants(module: Any, x: torch.Tensor) -> Any:
    mask = torch.full((4, 4), -1e9).triu(1)
    return x[torch.arange(4)] + mask, torch.tensor([1.0, 2.0, 3.0, 4.0]) * x, torch.ones_like(x)


def _converts(module: Any, x: torch.Tensor) -> Any:
    return x.to(torch.device("cpu"), torch.float64), x.cpu() + 1, x.to(x.device)


def _writes(module: Any, x: torch.Tensor) -> Any:
    module.total.add_(module.linear(x))
    y = x.clone()
    y[0] = 1.0
    return module.total + y


def _attends(module: Any, x: torch.Tensor) -> Any:
    y = module.linear(x)[None]
    return F.scaled_dot_product_attention(y, y, y, is_causal=True), F.layer_norm(y, (4,))


def _branches(module: Any, x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: F.gelu(x) + 1, lambda x: x.softmax(-1), (x,))


BODIES = [_makes_constants, _converts, _writes, _attends, _branches]


def _exported(body: Callable[..., Any]) -> ExportedProgram:
    torch.manual_seed(0)
    with torch.no_grad():
        return exported(calls(body), torch.randn(4, 4))


def _devices(program: ExportedProgram) -> set[str]:
    """Return the devices of what is computed, and of what operators are given."""
    found = set()
    for gm in graphs_of(program.graph_module):
        for node in gm.graph.nodes:
            for leaf in pytree.tree_leaves((node.args, dict(node.kwargs), node.meta.get("val"))):
                if isinstance(leaf, torch.Tensor):
                    found.add(leaf.device.type)
                if isinstance(leaf, torch.device):
                    found.add(leaf.type)
    return found


@pytest.mark.parametrize("body", BODIES)
def test_what_is_computed_stays_on_the_device(body: Callable[..., Any]) -> None:
    program = on_cuda(_exported(body))
    assert explain(program).reason is None
    found = decompose(program)
    assert _devices(found) == {"cuda"}
    if body is not _attends:
        # All else is as on the CPU; torch 2.15 has attention of its own there.
        assert not differences(on_cpu(found), decompose(_exported(body)))


def test_a_cache_tells_devices_apart() -> None:
    cache = DecompositionCache()
    decompose(_exported(_attends), cache=cache)
    assert _devices(decompose(on_cuda(_exported(_attends)), cache=cache)) == {"cuda"}
    assert _devices(decompose(_exported(_attends), cache=cache)) == {"cpu"}


@pytest.mark.parametrize("body", BODIES)
def test_a_program_of_the_cpu_again(body: Callable[..., Any]) -> None:
    program = _exported(body)
    given = on_cuda(program)
    found = on_cpu(given)
    assert _devices(given) == {"cuda"}
    assert _devices(found) == {"cpu"}
    assert not differences(found, program)
    inputs = torch.randn(4, 4)
    torch.testing.assert_close(found.module()(inputs), program.module()(inputs))


def test_what_is_on_the_cpu_is_returned_itself() -> None:
    program = _exported(_attends)
    assert on_cpu(program) is program


def test_sizes_and_what_is_conjugated_are_kept() -> None:
    rows = torch.export.Dim("rows", min=2, max=64)
    model, x = Of(lambda x: (x.conj(), x.mT[1:])), torch.randn(4, 3, dtype=torch.complex64)
    program = exported(model, x, dynamic_shapes=(({0: rows},),))
    given = copy.deepcopy(program)
    mode = fake_mode_of(given.graph_module)
    for node in given.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            plain = value.conj() if value.is_conj() else value
            made = replace(TensorFacts.of(plain), device=torch.device("cuda:0"))
            moved = made.input_fake(mode)
            node.meta["val"] = moved.conj() if value.is_conj() else moved
    found = on_cpu(given)
    assert not differences(found, program)
    values = [
        (n.meta["val"], o.meta["val"])
        for n, o in zip(found.graph.nodes, program.graph.nodes, strict=True)
        if isinstance(n.meta.get("val"), torch.Tensor)
    ]
    assert all(one.is_conj() is other.is_conj() for one, other in values)


def test_methods_share_what_they_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Half(nn.Module):
        def __init__(self, cache: torch.Tensor, first: bool) -> None:
            super().__init__()
            self.register_buffer("cache", cache)
            self.register_buffer("part", cache[int(not first) :])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.get_buffer("cache")[:1] + self.get_buffer("part")[:1] + x

    whole = torch.randn(3, 4)
    programs = {
        name: torch.export.export(Half(whole, first), (torch.ones(4),))
        for name, first in (("one", True), ("two", False))
    }
    # Where there is no GPU, all is taken for elsewhere.
    monkeypatch.setattr(devices, "_is_on_cpu", lambda value: not isinstance(value, torch.Tensor))
    found = methods_on_cpu(programs)
    held = [each for one in found.values() for each in one.state_dict.values()]
    assert len(held) == 4
    assert len({*map(storage_identity, held)}) == 1
    for name, program in programs.items():
        assert found[name] is not program
        torch.testing.assert_close(found[name].state_dict, program.state_dict)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch turns autocast off without a GPU")
def test_autocast_of_a_device_that_is_not_here_is_refused() -> None:
    def cast(module: Any, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module.linear(x) @ x

    with pytest.raises(DecomposeError, match="an autocast region needs cuda"):
        on_cpu(on_cuda(_exported(cast)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("body", BODIES)
def test_numbers_on_a_gpu(body: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"), torch.no_grad():
        module, x = calls(body).eval(), torch.randn(4, 4)
        program = torch.export.export(copy.deepcopy(module), (x.clone(),))
        found = decompose(program)
        assert not differences(found, program.run_decompositions())
        expected = copy.deepcopy(module)(x.clone())
        torch.testing.assert_close(found.module()(x.clone()), expected)
        again = on_cpu(program).module()
    with torch.no_grad():
        torch.testing.assert_close(again(x.cpu()), copy.deepcopy(module).cpu()(x.cpu()))
