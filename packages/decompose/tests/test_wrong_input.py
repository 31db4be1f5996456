"""What is of another kind than expected is one clear error, before anything is looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.export import export

from lowerdeck.decompose import DecomposeError, decompose, explain

ATEN = torch.ops.aten
PROGRAM = export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))


@pytest.mark.parametrize("asked", [decompose, explain])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"exported_program": torch.nn.Linear(2, 2)}, "found a Linear, expected an Exported"),
        ({"table": 3}, "found a int as table"),
        ({"table": {3: torch.relu}}, "the table has 3"),
        ({"table": {ATEN.linear.default: 7}}, "the table has .*linear.*: 7"),
        ({"keep": ATEN.linear.default}, "as keep, expected a collection"),
        ({"keep": [3]}, "keep names 3"),
        ({"keep": ["aten.linear"]}, "keep names 'aten.linear'"),
        ({"cache": 3}, "found a int as cache"),
    ],
)
def test_wrong_arguments_are_told(asked: Any, given: dict[str, Any], told: str) -> None:
    with pytest.raises(DecomposeError, match=told):
        asked(**{"exported_program": PROGRAM, **given})


def test_all_that_torch_takes_as_a_table_is_taken() -> None:
    tables: list[Any] = [None, {}, torch.export.default_decompositions()]
    names = [
        [str(node.target) for node in decompose(PROGRAM, table).graph.nodes if node.args]
        for table in tables
    ]
    assert names[0] == names[2] == ["aten.permute.default", "aten.addmm.default", "output"]
    assert names[1] == ["aten.linear.default", "output"]
