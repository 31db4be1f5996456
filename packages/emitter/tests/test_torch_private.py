"""What this package expects of torch's unpromised parts; a new torch breaks here first."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.export import Dim, export
from torch.fx.experimental.proxy_tensor import make_fx

from lowerdeck.decompose import Rules, decompose_graph
from lowerdeck.emitter import _torch_private as private
from lowerdeck.torch_base import expression_of

ATEN = torch.ops.aten


def rows_of(size: Any) -> Any:
    """Return the number of rows of an input, which varies."""
    program = export(torch.nn.ReLU(), (torch.ones(4, 2),), dynamic_shapes=({0: size},))
    return next(iter(program.graph.nodes)).meta["val"].shape[0]


def test_what_is_known_needs_no_guard() -> None:
    assert private.is_known(3 > 2)
    assert not private.is_known(2 > 3)
    size = rows_of(Dim("rows", min=2, max=9))
    assert private.is_known(size >= 2)
    assert not private.is_known(size >= 3)
    assert not private.is_known(size < 3)


def test_importing_the_package_does_not_load_sympy() -> None:
    code = "import sys, lowerdeck.emitter; print('sympy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "False"


def test_dimensions_have_the_names_that_the_user_gave() -> None:
    size = rows_of(Dim("rows", max=7))
    assert private.dimension_names(size) == {str(expression_of(size)): "rows"}


def test_a_rule_can_ask_what_the_node_gave_before() -> None:
    asked: list[tuple[int, ...]] = []

    def rule(*_: object) -> object:
        asked.append(private.current_result().shape)
        return NotImplemented

    exported = export(torch.nn.ReLU(), (torch.ones(3, 2),))
    decompose_graph(exported, Rules({ATEN.relu.default: rule}, {}, by_result=True))
    assert asked == [(3, 2)]
    assert private.current_result() is None


def test_sizes_of_another_trace_can_be_compared_while_tracing() -> None:
    size = rows_of(Dim("rows", max=7))

    def compared(x: torch.Tensor) -> torch.Tensor:
        with private.untraced():
            assert not private.is_known(size + 1 == 1)
        return x + 1

    assert make_fx(compared)(torch.ones(1)).graph
    with pytest.raises(RuntimeError, match="not tracked with proxy"):
        make_fx(lambda x: x + int(private.is_known(size + 1 == 1)))(torch.ones(1))
