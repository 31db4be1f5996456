"""A program in two parts, one behind the other, each for a backend of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.lowered_module.authoring.module_partitioner import tag_owned
from lowerdeck.lowered_module.authoring.partitioner import (
    DelegationSpec,
    Partitioner,
    PartitionResult,
)
from lowerdeck.lowered_module.errors import PartitionError
from lowerdeck.lowered_module.program.tags import DELEGATION_TAG
from lowerdeck.torch_base import OpOverload, graphs_of, module_path


class Halves(Partitioner):
    """Lets one partitioner take what comes before a place of the program, another the rest.

    A place is where one tensor is handed on and nothing else: there a change of backends costs
    least. What a partitioner takes across it is cut, which leaves no circle, since the nodes of a
    graph come after what they need.

    Args:
        first: Partitioner of what comes before.
        second: Partitioner of what comes behind.
        number: Which of the places, evenly spread, from 1 on.
        of: How many.

    Attributes:
        after: Name of the module, or else the node, behind which it was cut.
    """

    def __init__(self, first: Any, second: Any, number: int, of: int) -> None:
        super().__init__()
        self._both = (first, second)
        self._number, self._of = number, of
        self.after: str = ""

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Return the program with the first one's tags before the place, the second one's behind.

        Raises:
            PartitionError: One tensor alone is handed on nowhere.
        """
        places = narrow_places(exported_program)
        if not places:
            raise PartitionError("found no place at which one tensor alone is handed on")
        place = places[self._number * len(places) // (self._of + 1)]
        self.after = module_path(place) or place.name
        nodes = list(exported_program.graph.nodes)
        before = set(nodes[: nodes.index(place) + 1])
        every = [
            node for gm in graphs_of(exported_program.graph_module) for node in gm.graph.nodes
        ]
        chosen: dict[Node, str] = {}
        owned: set[Node] = set()
        specs: dict[str, DelegationSpec] = {}
        for number, partitioner in enumerate(self._both):
            result = partitioner(exported_program)
            tags = {node: node.meta.pop(DELEGATION_TAG, None) for node in every}
            for node, tag in tags.items():
                if tag is None:
                    continue
                if node.op == "placeholder":
                    owned.add(node)
                elif (node in before) == (number == 0):
                    chosen[node] = f"part{number}_{tag}"
                    specs[chosen[node]] = result.partition_tags[tag]
        for node, tag in chosen.items():
            node.meta[DELEGATION_TAG] = tag
        tag_owned(exported_program, owned)
        return PartitionResult(exported_program, specs)

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[OpOverload], Callable[[Node], bool] | None]:
        """Return what either of the two wants undivided."""
        asked = [
            one.ops_to_not_decompose(ep)
            for one in self._both
            if hasattr(one, "ops_to_not_decompose")
        ]

        def wanted(node: Node) -> bool:
            return any(
                node.target in operators and (keeps is None or keeps(node))
                for operators, keeps in asked
            )

        return list(dict.fromkeys(one for operators, _ in asked for one in operators)), wanted


def narrow_places(program: ExportedProgram) -> list[Node]:
    """Return the calls behind which their result is all that later calls need of earlier ones.

    Args:
        program: The program; its inputs and weights are at hand everywhere.
    """
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    position = {node: number for number, node in enumerate(calls)}
    needed = [
        max((position.get(user, len(calls)) for user in node.users), default=-1) for node in calls
    ]
    found: list[Node] = []
    furthest = -1
    for number, node in enumerate(calls):
        # Nothing before this call is needed behind it, and behind it comes a call.
        passed_on = isinstance(node.meta.get("val"), torch.Tensor)
        if furthest <= number < needed[number] and passed_on and number + 1 < len(calls):
            found.append(node)
        furthest = max(furthest, needed[number])
    return found
