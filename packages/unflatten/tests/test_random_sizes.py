"""Random trees of modules with two sizes that vary: changed one at a time, they equal eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_sizes import SHAPES, Whole, changes  # type: ignore[import-not-found]
from torch.export import Dim, ExportedProgram

from lowerdeck.unflatten import InputConstraintError, UnflattenError, export_preserving, unflatten


def assert_close(found: Any, want: Any) -> None:
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("export", [export_preserving, torch.export.export])
@pytest.mark.parametrize(
    "seed", [4, *(pytest.param(seed, marks=pytest.mark.heavy) for seed in (5, 7))]
)
def test_random_trees_compute_their_own_sizes(
    seed: int, export: Callable[..., ExportedProgram]
) -> None:
    eager = Whole(seed).eval()
    sizes = ({0: Dim.AUTO, 1: Dim.AUTO},)
    program = export(eager, (torch.randn(SHAPES[0]),), dynamic_shapes=sizes)
    whole: Any = unflatten(program, preserve="all")
    inputs = [torch.randn(shape) for shape in SHAPES]
    calls: list[tuple[str, Any, Any]] = []
    paths = [
        path for path, module in eager.named_modules() if path and "forward" in vars(type(module))
    ]
    watched = copy.deepcopy(eager)
    for path in paths:
        watched.get_submodule(path).register_forward_hook(
            lambda _, args, result, path=path: calls.append((path, args, result))
        )
    for x in inputs:
        assert_close(whole(x), watched(x))
    for path, args, result in list(calls):
        assert_close(whole.get_submodule(path)(*args), result)
    right = 0
    for path in paths:
        for name, change in changes(path, eager):
            made, want = unflatten(program, preserve="all"), copy.deepcopy(eager)
            try:
                change(made)
            except UnflattenError:
                assert (name, export) == ("swap", torch.export.export)
                continue
            change(want)
            for x in inputs:
                wanted = want(x)
                try:
                    found = made(x)
                except InputConstraintError:
                    assert name != "swap"
                    continue
                assert_close(found, wanted)
                right += 1
    assert right
