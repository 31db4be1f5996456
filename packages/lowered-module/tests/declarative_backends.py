"""A declarative backend of a few operators, its runtime, and models for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from lowerdeck.lowered_module import (
    DeclarativeBackend,
    PartitionView,
    arguments_of,
    operator_name,
    visits,
)
from lowerdeck_zoo import Holding

FLOAT = {torch.float32}


class Pocket(DeclarativeBackend):
    """Adds, multiplies, splits, and has tanh."""

    owns_state = True

    @visits("aten.add.Tensor", dtypes=FLOAT, when=lambda node: arguments_of(node)["alpha"] == 1)
    @visits("aten.mul.Tensor", dtypes=FLOAT)
    @visits("aten.tanh", dtypes=FLOAT, ranks={1, 2})
    def elementwise(self, part: PartitionView, node: Node) -> None:
        operands = [[part.index(a)] if isinstance(a, Node) else a for a in node.args]
        part.emit([operator_name(node).split(".")[1], part.index(node), operands])

    @visits("aten.split.Tensor")
    def split(self, part: PartitionView, node: Node) -> None:
        results = [None if found is None else part.index(found) for found in part.parts(node)]
        part.emit(["split", results, [[part.index(node.args[0])], node.args[1]]])  # type: ignore[arg-type]

    def compile(self, part: PartitionView) -> bytes:
        return json.dumps(
            {
                "specs": sorted(part.compile_specs),
                "inputs": [part.index(node) for node in part.inputs],
                "weights": {part.index(n): t.tolist() for n, t in part.constants.items()},
                "code": part.instructions,
                "state": {part.index(n): part.index(new) for n, new in part.mutations.items()},
                "outputs": [part.index(node) for node in part.outputs],
            }
        ).encode()


class PocketRuntime:
    """Runs what Pocket compiled."""

    def init(self, blob: Any, compile_specs: Any, named_data: Any) -> Any:
        program = json.loads(bytes(blob))
        program["values"] = {int(k): torch.tensor(v) for k, v in program["weights"].items()}
        return program

    def input_count(self, program: Any) -> int:
        return len(program["inputs"])

    def execute(self, program: Any, inputs: Sequence[Any]) -> list[torch.Tensor]:
        values = dict(program["values"])
        values.update(zip(program["inputs"], inputs, strict=True))
        for name, result, operands in program["code"]:
            taken = [values[a[0]] if isinstance(a, list) else a for a in operands]
            found = getattr(torch, name)(*taken)
            if name == "split":
                values.update(zip(result, found, strict=True))
            else:
                values[result] = found
        for old, new in program["state"].items():
            program["values"][int(old)] = values[new].clone()
        return [values[number] for number in program["outputs"]]


class Counting(Holding, count=lambda: torch.zeros(2)):
    """Counts its calls."""

    def forward(self, x: torch.Tensor) -> Any:
        self.count.add_(1)
        return x * self.count
