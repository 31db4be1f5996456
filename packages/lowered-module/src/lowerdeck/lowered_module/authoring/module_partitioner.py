"""Delegation by modules of the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.lowered_module.authoring.partitioner import (
    DelegationSpec,
    Partitioner,
    PartitionerLike,
    PartitionResult,
    require_partitioner,
)
from lowerdeck.lowered_module.errors import PartitionError
from lowerdeck.lowered_module.program.functional import changing_inputs
from lowerdeck.lowered_module.program.graphs import nodes_of
from lowerdeck.lowered_module.program.tags import DELEGATION_TAG
from lowerdeck.torch_base import OpOverload, state_tensors

_CALL = re.compile(r"@\d+$")
_SHOWN = 8


class ModulePartitioner(Partitioner):
    """Partition selected modules with given partitioners, each module separately.

    ``unflatten`` of the lowered program puts each delegate into the module whose nodes it
    replaces.

    Args:
        by_module: Partitioners by patterns of module names, such as ``"layers.*"`` (``*`` matches
            dots too): a partitioner, or the name of a backend that gets all operator calls of the
            module. If nested modules match a pattern, the outermost counts. Earlier patterns
            take precedence.

    Raises:
        PartitionError: ``by_module`` is empty, a pattern is not a string, or a value is neither a
            partitioner nor a string.

    Example:
        >>> import torch
        >>> class Relus(Partitioner):
        ...     def partition(self, exported_program):
        ...         for node in exported_program.graph.nodes:
        ...             if node.target is torch.ops.aten.relu.default:
        ...                 node.meta["delegation_tag"] = "relu"
        ...         return PartitionResult(exported_program, {"relu": DelegationSpec("Mine", [])})
        >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU(), torch.nn.ReLU())
        >>> program = torch.export.export(model, (torch.ones(2),))
        >>> sorted(ModulePartitioner({"[01]": Relus()})(program).partition_tags)
        ['relu_0', 'relu_1']
    """

    def __init__(self, by_module: Mapping[str, PartitionerLike | str]) -> None:
        super().__init__()
        self.refused: Mapping[str, str] = {}
        patterns: Any = by_module
        is_mapping = isinstance(patterns, Mapping) and len(patterns) > 0
        if not is_mapping or not all(isinstance(pattern, str) for pattern in patterns):
            raise PartitionError(
                f"found {patterns!r} as by_module, expected a mapping from patterns of module "
                "names, such as 'layers.*', to partitioners or names of backends"
            )
        self._by_module: dict[str, PartitionerLike] = {}
        for pattern, chosen in by_module.items():
            self._by_module[pattern] = Everything(chosen) if isinstance(chosen, str) else chosen
            require_partitioner(self._by_module[pattern])

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Return the program with tags for each unit in which a partitioner selects nodes."""
        every = list(nodes_of(exported_program.graph_module))
        self._check_patterns(every)
        chosen: dict[Node, str] = {}
        specs: dict[str, DelegationSpec] = {}
        owned: set[Node] = set()
        refused: dict[str, str] = {}
        for pattern, partitioner in self._by_module.items():
            result = partitioner(exported_program)
            refused.update(getattr(partitioner, "refused", {}))
            tags = {node: node.meta.pop(DELEGATION_TAG, None) for node in every}
            owned |= {node for node, tag in tags.items() if tag and node.op == "placeholder"}
            # Consecutive nodes of a partition within one module call form a partition again: no
            # value leaves it and comes back through other nodes of the original partition, which
            # all come before or after it.
            runs: dict[str, tuple[str | None, str]] = {}  # by tag: the call, the new tag
            for node in every:
                tag = tags[node]
                if tag is None or node.op == "placeholder":
                    continue
                call, path = (None, "") if node in chosen else _unit(node, pattern)
                if tag not in runs or runs[tag][0] != call:
                    runs[tag] = (call, _new_tag(f"{tag}_{path}", specs) if path else "")
                    if path:
                        specs[runs[tag][1]] = result.partition_tags[tag]
                if runs[tag][1]:
                    chosen[node] = runs[tag][1]
        for node, tag in chosen.items():
            node.meta[DELEGATION_TAG] = tag
        tag_owned(exported_program, owned)
        self.refused = refused
        return PartitionResult(exported_program, specs)

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[OpOverload], Callable[[Node], bool] | None]:
        """Return the operators that at least one partitioner requires undecomposed.

        Args:
            ep: The program before decomposition.
        """
        every = [
            getattr(partitioner, "ops_to_not_decompose", None)
            for partitioner in self._by_module.values()
        ]
        operators = [
            operator for method in every if method is not None for operator in method(ep)[0]
        ]
        return list(dict.fromkeys(operators)), None

    def _check_patterns(self, nodes: list[Node]) -> None:
        paths = list(dict.fromkeys(path for node in nodes for _, path in _calls(node)))
        for pattern in self._by_module:
            if not any(fnmatchcase(path, pattern) for path in paths):
                examples = ", ".join(paths[:_SHOWN]) + (", ..." if len(paths) > _SHOWN else "")
                raise PartitionError(
                    f"found the pattern {pattern!r} in by_module, expected one that matches a "
                    f"called module: {examples or 'none'}"
                )


class Everything(Partitioner):
    """Delegate all operator calls to one backend."""

    def __init__(self, backend_id: str) -> None:
        super().__init__()
        self._spec_of_all = DelegationSpec(backend_id, [])

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Return the program with one tag on all operator calls, parameters and other state."""
        for node in nodes_of(exported_program.graph_module):
            if node.op == "call_function" and isinstance(node.target, OpOverload):
                node.meta[DELEGATION_TAG] = "all"
        # Inputs of the user are owned by no delegate.
        for node in state_tensors(exported_program):
            node.meta[DELEGATION_TAG] = "all"
        return PartitionResult(exported_program, {"all": self._spec_of_all})


def _unit(node: Node, pattern: str) -> tuple[str | None, str]:
    """Return the call and the name of the outermost module that matches ``pattern``."""
    return next((call for call in _calls(node) if fnmatchcase(call[1], pattern)), (None, ""))


def _new_tag(stem: str, used: Container[str]) -> str:
    # Tags become attribute names, where a dot would mean a nested module.
    stem = tag = re.sub(r"\W", "_", stem)
    number = 1
    while tag in used:
        number += 1
        tag = f"{stem}_{number}"
    return tag


def _calls(node: Node) -> Iterator[tuple[str, str]]:
    """Yield the key and module name of each module call around a node, the outermost first.

    Two consecutive calls of one module have different keys.
    """
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        if path:
            yield key, _CALL.sub("", path)


def tag_owned(program: ExportedProgram, owned: set[Node]) -> None:
    """Retag owned placeholders with the new partitions that read them, in place.

    Args:
        owned: Placeholders that the partitioners tagged.
    """
    changing = changing_inputs(program)
    for node in program.graph.find_nodes(op="placeholder"):
        tags = {user.meta.get(DELEGATION_TAG) for user in node.users}
        mine = sorted(tag for tag in tags if tag is not None)
        if node in owned and mine and (len(tags) == 1 or node not in changing):
            node.meta[DELEGATION_TAG] = mine[0]
