"""What stands in a region of autocast is of the dtypes that eager gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowerdeck.decompose import decompose, explain
from lowerdeck.torch_base import pytree
from lowerdeck_zoo import Of, exported

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

ATEN = torch.ops.aten
LINES: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda x: torch.einsum("bhqd,bhkd->bhqk", x, x),
    lambda x: torch.tensordot(x, x, dims=([3], [3])),
    lambda x: torch.inner(x[0, 0], x[0, 0]),
    lambda x: torch.kron(x[0, 0], x[0, 0]),
    lambda x: nn.functional.linear(x, x[0, 0]),
    lambda x: x @ x.mT,
    lambda x: nn.functional.bilinear(x[0, 0], x[0, 0], x[0]),
    lambda x: nn.functional.cosine_similarity(x, x + 1),
    lambda x: nn.functional.cross_entropy(x[0, 0], x[0, 0].softmax(-1)),
    lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
    lambda x: torch.einsum("bhqd,bhkd->bhqk", x @ x.mT, x),
    lambda x: torch.linalg.matrix_power(x, 3),
    lambda x: torch.linalg.multi_dot([x[0, 0]] * 3),
    lambda x: torch.einsum("bhqd,bhkd->bhqk", x, x).softmax(-1) + x.norm(),
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None], ids=str)
def test_dtypes_are_those_of_eager(dtype: torch.dtype | None) -> None:
    def forward(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            return [line(x) for line in LINES]

    model, x = Of(forward), torch.rand(2, 2, 3, 3)
    program = torch.export.export(model, (x,))
    assert explain(program).reason is None
    made = decompose(program)
    found, expected = made.module()(x), model(x)
    assert [leaf.dtype for leaf in pytree.tree_leaves(found)] == [
        leaf.dtype for leaf in pytree.tree_leaves(expected)
    ]
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    said = [node.meta["val"].dtype for node in made.graph.output_node().args[0]]
    assert said == [leaf.dtype for leaf in pytree.tree_leaves(found)]


def test_a_call_that_stays_in_a_region_goes_torchs_way() -> None:
    def both(own: Any, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = own.linear(x)
        return inside, own.linear(x)

    program = exported(Of(both, linear=nn.Linear(3, 3)), torch.rand(2, 3))
    keep = {ATEN.linear.default: lambda call: True}
    assert "in an autocast region" in str(explain(program, keep=keep))
    kept = decompose(program, keep=keep).graph.find_nodes(
        op="call_function", target=ATEN.linear.default
    )
    assert [node.meta["val"].dtype for node in kept] == [torch.bfloat16, torch.float32]
