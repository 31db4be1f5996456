"""Move the partitions of a tagged program to submodules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputSpec, OutputSpec
from torch.fx import GraphModule, Node

from lowerdeck.graph_fuser import CycleError, Region, outline
from lowerdeck.lowered_module._executorch import is_exir
from lowerdeck.lowered_module.authoring.registry import find_backend
from lowerdeck.lowered_module.partition.grouping import Groups, group_by_tag
from lowerdeck.lowered_module.partition.ownership import settle_ownership
from lowerdeck.lowered_module.program.debug_handles import assign_debug_handles
from lowerdeck.lowered_module.program.edge_form import without_edge_operators
from lowerdeck.lowered_module.program.functional import refuse_lost_mutation
from lowerdeck.lowered_module.program.signature import SignatureIndex, sub_program
from lowerdeck.torch_base import attribute_of


@dataclass(slots=True)
class Cut:
    """One partition of a program.

    Attributes:
        backend_id: Name of its backend.
        backend: Class of the backend.
        compile_specs: The compile specs of that backend.
        program: The partition as a program.
        label: Name of the partition in errors: the tag, and the nested graph if any.
        owner: The graph that contained it; None for a whole program.
        call: The node of ``owner`` that calls it; None for a whole program.
        owned: The owner's input specs of the tensors that the partition owns, by the owner's node
            name.
        mutated: The owner's output specs of the mutations that the partition performs, by the name
            of the owner's node with the new value.
    """

    backend_id: str
    backend: Any
    compile_specs: list[Any]
    program: ExportedProgram
    label: str
    owner: Any = None
    call: Any = None
    owned: Mapping[str, InputSpec] = field(default_factory=dict)
    mutated: Mapping[str, list[OutputSpec]] = field(default_factory=dict)


@dataclass(slots=True)
class CutProgram:
    """A program whose partitions were moved to submodules; changed in place.

    Attributes:
        cuts: The partitions in the graph's order, those of the outermost graph first.
        next_handle: The smallest debug handle that is greater than all in use.
    """

    program: ExportedProgram
    cuts: list[Cut]
    next_handle: int


def cut_program(program: ExportedProgram, tags: Mapping[str, Any]) -> CutProgram:
    """Move the tagged partitions of ``program`` to submodules, in place, also in nested graphs.

    Args:
        program: A working copy with real weights and tags.
        tags: The ``DelegationSpec`` of each tag.

    Raises:
        AliasingError: A partition would lose an in-place write.
        BackendNotFoundError: The backend of a partition is unknown.
        PartitionError: A node that cannot be delegated is tagged.
        OwnershipError: A partition cannot own a tagged tensor.
        lowerdeck.graph_fuser.GraphFuserError: A value leaves a partition and comes back, so the
            partition cannot be one call.
    """
    top = program.graph_module
    groups = group_by_tag(top, tags)
    # The Edge dialect does not declare aliases.
    with without_edge_operators(program):
        owned = settle_ownership(program, groups, tags)
    next_handle = assign_debug_handles(top)
    # A DelegationSpec of ExecuTorch names a backend of ExecuTorch.
    find = cache(lambda name, peers: find_backend(name, peers=peers))
    cuts: list[Cut] = []
    seen: set[int] = set()
    waiting = [("", top)]
    while waiting:
        where, gm = waiting.pop(0)
        if id(gm) in seen:
            continue
        seen.add(id(gm))
        if where:
            # Nested graphs get all tensors as inputs, so their partitions own none.
            groups, owned = group_by_tag(gm, tags), {}
        for tag, call, parts in _cut_graph(program, gm, groups, owned):
            spec = tags[tag]
            backend = find(spec.backend_id, is_exir(spec))
            label = f"{tag!r}" + (f" in {where.rstrip('.')}" if where else "")
            part, *rest = parts
            specs = list(spec.compile_specs)
            cuts.append(Cut(spec.backend_id, backend, specs, part, label, gm, call, *rest))
        for node in gm.graph.find_nodes(op="get_attr"):
            child = attribute_of(gm, node)
            if isinstance(child, GraphModule):
                waiting.append((f"{where}{node.target}.", child))
    return CutProgram(program, cuts, next_handle)


def _cut_graph(
    program: ExportedProgram, gm: GraphModule, groups: Groups, owned: Mapping[str, Sequence[Node]]
) -> Iterator[tuple[str, Node, Any]]:
    """Move the groups of one graph to submodules; yield the tag, call and parts of each."""
    if not groups:
        return
    refuse_lost_mutation(program, gm, {n: tag for tag, nodes in groups.items() for n in nodes})
    regions: dict[Region, str] = {}
    # Tags may contain dots or clash with attributes, so submodules get new names.
    for (tag, nodes), name in zip(groups.items(), free_names(gm, "fused"), strict=False):
        # Owned tensors that are not read (unused weights, write-only buffers) are forced to be
        # inputs.
        inside = set(nodes)
        unread = [node for node in owned.get(tag, ()) if not inside.intersection(node.users)]
        regions[Region(name, nodes, always_return_tuple=True, inputs=unread)] = tag
    try:
        outlined_regions = outline(gm, list(regions))
    except CycleError as error:
        names = {name for name in error.regions if name is not None}
        partitions = [
            f"{r.name} is partition {tag!r}" for r, tag in regions.items() if r.name in names
        ]
        raise CycleError(f"{error} ({'; '.join(partitions)})", error.path, error.regions) from None
    is_top = gm is program.graph_module
    index = SignatureIndex.of(program) if is_top else SignatureIndex()
    by_call = {one.call_node: (regions[region], one) for region, one in outlined_regions.items()}
    for call in [node for node in gm.graph.nodes if node in by_call]:
        tag, outlined = by_call[call]
        placeholders = outlined.module.graph.find_nodes(op="placeholder")
        own = set(owned.get(tag, ()))
        mine = {n for n, outer in zip(placeholders, call.args, strict=True) if outer in own}
        yield tag, call, sub_program(outlined.module, program, mine, call, index)


def free_names(module: torch.nn.Module, stem: str) -> Iterator[str]:
    """Yield unused attribute names of a module, numbered from 0.

    Names may be added to the module meanwhile.
    """
    return (name for n in count() if not hasattr(module, name := f"{stem}_{n}"))
