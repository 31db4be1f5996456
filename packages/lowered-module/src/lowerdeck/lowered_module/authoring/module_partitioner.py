"""Delegation by modules: which backend takes what of which modules of the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.lowered_module.authoring.partitioner import (
    DelegationSpec,
    Partitioner,
    PartitionResult,
)
from lowerdeck.lowered_module.errors import PartitionError
from lowerdeck.lowered_module.program.functional import changing_inputs
from lowerdeck.lowered_module.program.tags import DELEGATION_TAG
from lowerdeck.torch_base import OpOverload, graphs_of, state_tensors

PartitionerLike = Callable[[ExportedProgram], Any]
_CALL = re.compile(r"@\d+$")
_SHOWN = 8


class ModulePartitioner(Partitioner):
    """Lets backends take what they can of chosen modules; no partition spans two of them.

    ``unflatten`` of the lowered program has each delegate in the module that it was cut out of.

    Args:
        by_module: From patterns of module names, such as ``"layers.*"`` (``*`` stands for dots
            too), to what partitions them: a partitioner, or the name of a backend that takes
            everything. The outermost module that a pattern matches is one unit; of patterns that
            match one module the first chooses first.

    Raises:
        PartitionError: A pattern or what it leads to is of another kind.

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
        given: Any = by_module
        if not isinstance(given, Mapping) or not given:
            raise PartitionError(
                f"found {given!r} as by_module, expected a mapping from patterns of module names, "
                "such as 'layers.*', to partitioners or names of backends"
            )
        self._by_module: dict[str, PartitionerLike] = {}
        for pattern, chosen in by_module.items():
            if not isinstance(pattern, str) or isinstance(chosen, type):
                raise PartitionError(
                    f"found {pattern!r}: {chosen!r} in by_module, expected a pattern of module "
                    "names and a partitioner object, or the name of a backend"
                )
            taker = Everything(chosen) if isinstance(chosen, str) else chosen
            if not callable(taker):
                raise PartitionError(
                    f"found a {type(chosen).__name__} for {pattern!r} in by_module, expected a "
                    "partitioner or the name of a backend"
                )
            self._by_module[pattern] = taker

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Return the program with a tag for each unit that a partitioner takes something of."""
        graphs = [gm.graph for gm in graphs_of(exported_program.graph_module)]
        every = [node for graph in graphs for node in graph.nodes]
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
            runs = _Runs(pattern, specs)
            for node in every:
                tag = tags[node]
                if tag is not None and node.op != "placeholder":
                    run = runs.of(node, tag, result.partition_tags, taken=node in chosen)
                    if run is not None:
                        chosen[node] = run
        for node, tag in chosen.items():
            node.meta[DELEGATION_TAG] = tag
        tag_owned(exported_program, owned)
        self.refused = refused
        return PartitionResult(exported_program, specs)

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[OpOverload], Callable[[Node], bool] | None]:
        """Return the operators that any of the partitioners wants undivided.

        Args:
            ep: The program before decomposition.
        """
        wanted: list[OpOverload] = []
        for partitioner in self._by_module.values():
            asked = getattr(partitioner, "ops_to_not_decompose", None)
            wanted += asked(ep)[0] if asked is not None else []
        return list(dict.fromkeys(wanted)), None

    def _check_patterns(self, nodes: list[Node]) -> None:
        paths = list(dict.fromkeys(path for node in nodes for _, path in _calls(node)))
        for pattern in self._by_module:
            if not any(fnmatchcase(path, pattern) for path in paths):
                shown = ", ".join(paths[:_SHOWN]) + (", ..." if len(paths) > _SHOWN else "")
                raise PartitionError(
                    f"found the pattern {pattern!r} in by_module, which is the name of no module "
                    f"that the program calls; these are {shown or 'none'}"
                )


class Everything(Partitioner):
    """Gives all that is computed to one backend.

    Args:
        backend_id: Name of the backend.
    """

    def __init__(self, backend_id: str) -> None:
        super().__init__()
        self._spec_of_all = DelegationSpec(backend_id, [])

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Return the program with one tag on every call, and on all data that it reads."""
        for gm in graphs_of(exported_program.graph_module):
            for node in gm.graph.nodes:
                if node.op == "call_function" and isinstance(node.target, OpOverload):
                    node.meta[DELEGATION_TAG] = "all"
        # What the user passes in belongs to nobody.
        for node in state_tensors(exported_program):
            node.meta[DELEGATION_TAG] = "all"
        return PartitionResult(exported_program, {"all": self._spec_of_all})


class _Runs:
    """Parts a partition by modules.

    A run of a partition's nodes, in the graph's order, that are in one call of one module is a
    partition again: no value leaves it and comes back through the others, since these come before
    it or after it.

    Args:
        pattern: Which modules.
        specs: What tags mean; added to.
    """

    def __init__(self, pattern: str, specs: dict[str, DelegationSpec]) -> None:
        self._pattern = pattern
        self._specs = specs
        self._open: dict[str, tuple[str | None, str]] = {}  # by tag: the call, the new tag

    def of(
        self, node: Node, tag: str, meaning: Mapping[str, DelegationSpec], *, taken: bool
    ) -> str | None:
        """Return the tag of the run that ``node`` is in, None where it is in no chosen module."""
        call, path = (None, "") if taken else self._unit(node)
        known = self._open.get(tag)
        if known is None or known[0] != call:
            known = self._open[tag] = (call, self._new(tag, path) if path else "")
            if path:
                self._specs[known[1]] = meaning[tag]
        return known[1] or None

    def _unit(self, node: Node) -> tuple[str | None, str]:
        """Return the call and the name of the outermost module that matches."""
        calls = _calls(node)
        return next((one for one in calls if fnmatchcase(one[1], self._pattern)), (None, ""))

    def _new(self, tag: str, path: str) -> str:
        # Tags become names of attributes, where a dot would mean a module inside.
        wanted = found = re.sub(r"\W", "_", f"{tag}_{path}")
        number = 1
        while found in self._specs:
            number += 1
            found = f"{wanted}_{number}"
        return found


def _calls(node: Node) -> Iterator[tuple[str, str]]:
    """Yield the calls of modules that a node is in, and the modules' names, the outermost first.

    Of a module that is called twice running each call has a key of its own in the stack: the
    delegates are in the module, not around it.
    """
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        if path:
            yield key, _CALL.sub("", path)


def tag_owned(program: ExportedProgram, owned: set[Node]) -> None:
    """Give data that a partitioner took to the partitions that read it now.

    Args:
        program: The program, with the tags of the parts.
        owned: Placeholders that were tagged with what was parted.
    """
    changing = changing_inputs(program)
    for node in program.graph.find_nodes(op="placeholder"):
        tags = {user.meta.get(DELEGATION_TAG) for user in node.users}
        mine = sorted(tag for tag in tags if tag is not None)
        if node in owned and mine and (len(tags) == 1 or node not in changing):
            node.meta[DELEGATION_TAG] = mine[0]
