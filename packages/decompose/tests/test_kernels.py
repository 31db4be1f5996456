"""Results lie in memory as the kernels lay them, where torch's fake tensors say otherwise."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from program_likeness import differences  # type: ignore[import-not-found]
from torch import nn
from torch.utils import _pytree as pytree

from lowerdeck.decompose import Rules, decompose, take_apart
from lowerdeck_zoo import Of, exported

_ATEN = torch.ops.aten


class _Normed(nn.Module):
    """A norm over channels that are last, as speech models have it, then what views it."""

    def __init__(self, then: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.linear = nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.then = nn.Identity() if then is None else then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The first shows no order of dimensions, and is a kin of the second by all but sizes.
        y = self.first(x.flatten(0, 1)).view_as(x)
        made: torch.Tensor = self.linear(self.then(self.norm(y.transpose(1, 2))).transpose(1, 2))
        return made


def _run(program: torch.export.ExportedProgram, *inputs: torch.Tensor) -> Any:
    return program.module(check_guards=False)(*inputs)


@pytest.mark.parametrize(
    "then", [nn.Identity(), nn.ReLU(), nn.BatchNorm1d(8)], ids=lambda then: type(then).__name__
)
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("sizes", [(2, 5, 8), (1, 5, 8), (3, 1, 8)])
def test_a_norm_of_transposed_rows_can_be_run(
    sizes: tuple[int, ...], is_training: bool, then: Any
) -> None:
    torch.manual_seed(0)
    model = _Normed(then).train(is_training)
    x = torch.randn(sizes)
    program = torch.export.export(model, (x,))
    found = _run(decompose(program), x)
    torch.testing.assert_close(found, model(x))


def test_sizes_may_vary() -> None:
    model, x = _Normed().eval(), torch.randn(2, 5, 8)
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("rows")}
    program = torch.export.export(model, (x,), dynamic_shapes=(dims,))
    made = decompose(program)
    for sizes in ((2, 5, 8), (4, 7, 8)):
        x = torch.randn(sizes)
        torch.testing.assert_close(_run(made, x), model(x))


def test_what_torch_took_apart_can_be_run_again() -> None:
    model, x = _Normed().eval(), torch.randn(2, 5, 8)
    torchs = torch.export.export(model, (x,)).run_decompositions()
    file = io.BytesIO()
    torch.export.save(torchs, file)
    file.seek(0)
    for program in (torchs, torch.export.load(file)):
        torch.testing.assert_close(_run(decompose(program), x), model(x))


@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last])
def test_norms_of_images_are_as_torch_gives_them(fmt: torch.memory_format) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(60, 2)).eval()
    program = torch.export.export(model, (torch.randn(2, 3, 4, 5).to(memory_format=fmt),))
    assert not differences(decompose(program), program.run_decompositions())


def _lying(shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    made = torch.rand([shape[dim] for dim in order]) + 0.5
    return made.permute([order.index(dim) for dim in range(len(order))])


_PAIRS = (
    (_lying((2, 3, 4), (0, 1, 2)), _lying((2, 3, 4), (0, 2, 1))),
    (_lying((2, 3, 4), (0, 2, 1)), _lying((2, 3, 4), (0, 1, 2))),
    (_lying((3, 4), (0, 1)), _lying((2, 3, 4), (1, 0, 2))),
    (_lying((2, 3, 4), (0, 2, 1)), torch.tensor(2.0)),
    (_lying((2, 1, 4), (2, 0, 1)), _lying((3, 4), (1, 0))),
    (_lying((2, 3, 4), (2, 1, 0)), _lying((3, 1), (1, 0))),
)
_NOTHING = (None, None, True, 0.1, 1e-5)


def _of(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Weight, bias, mean and variance."""
    zeros, ones = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    return ones, zeros, zeros.clone(), ones.clone()


_CALLED: tuple[Callable[..., torch.Tensor], ...] = (
    torch.copysign,
    lambda x, y: torch.div(x, y, rounding_mode="floor"),
    lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    torch.logical_and,
    torch.logical_or,
    torch.logical_xor,
    lambda x, _: torch.pow(1.5, x),
    lambda x, _: _ATEN._native_batch_norm_legit.no_stats(x, *_NOTHING)[0],
    lambda x, _: _ATEN._batch_norm_with_update(x, *_of(x), 0.1, 1e-5)[0],
    lambda x, _: _ATEN._batch_norm_no_update(x, *_of(x), 0.1, 1e-5)[0],
)


def _shown(*called: Callable[..., torch.Tensor]) -> Of:
    """Return what each function returns, in several shapes."""

    def show(made: torch.Tensor) -> Any:
        return made, made.reshape(-1), made.transpose(0, -1).reshape(made.shape[-1], -1)

    return Of(lambda x, y: [show(one(x, y)) for one in called])


def _checked_run(made: torch.export.ExportedProgram, *inputs: torch.Tensor) -> Any:
    """Return what a program gives; hold what it says of strides to the run."""
    unlike = []

    class Running(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            found = super().run_node(n)
            value = n.meta.get("val")
            if isinstance(found, torch.Tensor) and isinstance(value, torch.Tensor):
                long = [dim for dim in range(found.dim()) if found.shape[dim] != 1]
                if [found.stride(dim) for dim in long] != [value.stride(dim) for dim in long]:
                    unlike.append((n.format_node(), found.stride(), value.stride()))
            return found

    found = Running(made.graph_module).run(*inputs)
    assert not unlike
    return found


@pytest.mark.parametrize("pair", range(len(_PAIRS)))
def test_strides_are_those_of_the_run(pair: int) -> None:
    model, inputs = _shown(*_CALLED), _PAIRS[pair]
    found = _checked_run(decompose(exported(model, *inputs)), *inputs)
    for one, other in zip(found, pytree.tree_leaves(model(*inputs)), strict=True):
        assert torch.equal(one, other)


def _scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * torch.pow(2.0, y)


def _folded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    # A rule that asks how its parts lie: the one view or the other fails when it is run.
    made = torch.copysign(x, y) * 2
    flat = made.view(-1) if made.is_contiguous() else made.reshape(-1)
    folded: torch.Tensor = flat.view_as(made)
    return folded


def _split(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    # Several results, of which the first is made of another one's.
    normed, mean, _ = _ATEN._native_batch_norm_legit.no_stats(torch.pow(2.0, x), *_NOTHING)
    made: torch.Tensor = (normed + mean.sum()) * (y * 0 + 1)
    return made


@pytest.mark.parametrize("pair", range(0, len(_PAIRS), 2))
@pytest.mark.parametrize("rule", [_scaled, _folded, _split])
def test_strides_inside_of_what_a_call_becomes_are_those_of_the_run(
    rule: Callable[..., torch.Tensor], pair: int
) -> None:
    table = {**torch.export.default_decompositions(), _ATEN.atan2.default: rule}
    inputs = _PAIRS[pair]
    made = decompose(exported(_shown(torch.atan2), *inputs), table)
    assert not made.graph.find_nodes(op="call_function", target=_ATEN.empty_strided.default)
    expected = pytree.tree_leaves(_shown(rule)(*inputs))
    for one, other in zip(_checked_run(made, *inputs), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_compiler_that_copies_gets_what_torch_gives() -> None:
    program = torch.export.export(_Normed().eval(), (torch.randn(2, 5, 8),))
    rules = Rules.of(None)
    own = Rules(rules.others, rules.composites)
    targets = [
        [node.target for node in graph.nodes]
        for graph in (
            take_apart(program, own).graph_module.graph,
            program.run_decompositions().graph,
        )
    ]
    assert targets[0] == targets[1]
